"""Random weights in a checkpoint's place: the arrays, types and shardings that its load gives."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax import ConfigError, checkpoint
from mtp_jax.model.narrow import without_bits
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.int4_files import write_models
from tests.golden import model_dir


def described(params) -> list[tuple[str, tuple[int, ...], str, object]]:
    """Path, shape, type and sharding of each array."""
    found, _ = jax.tree.flatten_with_path(params)
    return [(jax.tree_util.keystr(at), a.shape, str(a.dtype), a.sharding) for at, a in found]


@pytest.mark.parametrize(
    ("variant", "dtype", "narrow", "mesh"),
    [
        ("fp8", "bfloat16", "keep", None),
        ("v3", "float32", "multiplied", (2, 2)),
        pytest.param("v4_fp4", "bfloat16", "keep", None, marks=pytest.mark.rest),
        pytest.param("fp8", "float32", "multiplied", None, marks=pytest.mark.rest),
        pytest.param("bf16", "float32", "multiplied", None, marks=pytest.mark.rest),
        pytest.param("dsa_glm52", "float32", None, (1, 2), marks=pytest.mark.rest),
        pytest.param("v4_fp4", "float32", "multiplied", None, marks=pytest.mark.rest),
    ],
)
def test_they_are_what_the_loader_makes(variant, dtype, narrow, mesh):
    folder, over = model_dir(variant), mesh and make_mesh(*mesh)
    options = {"dtype": dtype, "narrow": narrow, "mesh": over}
    read, made = checkpoint.load(folder, **options), checkpoint.make_random(folder, **options)
    assert made.config == read.config
    assert described(made.params) == described(read.params)
    for a in jax.tree.leaves(without_bits(made.params)):
        whole = np.asarray(a)
        if a.size > 100 and a.dtype.kind == "f":
            assert np.isfinite(whole.astype(np.float32)).all()
            assert len(np.unique(whole.astype(np.float32))) > 1
        if mesh:  # equal parts on equal devices alone
            parts = {str(s.index): np.asarray(s.data) for s in a.addressable_shards}
            for s in a.addressable_shards:
                np.testing.assert_array_equal(s.data, parts[str(s.index)])
            differ = [p for p in parts.values() if p.size > 100 and p.std()]
            assert len({p.tobytes() for p in differ}) == len(differ)


@pytest.mark.rest
def test_int4_experts(tmp_path: Path):
    folder = write_models(tmp_path).packed
    read, made = (make(folder, narrow="keep") for make in (checkpoint.load, checkpoint.make_random))
    assert described(made.params) == described(read.params)


def test_layers_that_config_json_does_not_count():
    without = checkpoint.make_random(model_dir("fp8"), dtype="bfloat16", narrow="keep", num_nextn_layers=0)
    assert without.params.nextn == ()
    with pytest.raises(
        ConfigError, match=r"num_nextn_layers = 3, but config\.json counts 1; expected 0 to 1"
    ):
        checkpoint.make_random(model_dir("fp8"), num_nextn_layers=3)


def test_blocks_of_fp8_are_not_split():
    with pytest.raises(ConfigError, match="do not divide over 2 devices in fp8 blocks of 128"):
        checkpoint.make_random(model_dir("fp8"), narrow="keep", dtype="bfloat16", mesh=make_mesh(1, 2))
