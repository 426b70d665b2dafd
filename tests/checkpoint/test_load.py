"""What a load gives: the values in the files, in the shapes of the model, on the devices asked for."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoint import load, save_checkpoint
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Mlp, Moe, Params, Spec, param_specs
from mtp_jax.model.sharding import make_mesh, partition
from tests.checkpoint.files import (
    Raw,
    Tensors,
    assert_same,
    copy_folder,
    edit_json,
    edit_tensors,
    random_params,
    read_folder,
)
from tests.golden import VARIANTS, model_dir
from tests.models import apart

EMBED = "model.embed_tokens.weight"
KINDS = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2")}


def plainly(folder: Path, cfg: ModelConfig) -> Params:
    """The parameters in the most direct way, for checkpoints without fp8."""
    raw = read_folder(folder)

    def array(name: str) -> np.ndarray:
        t = raw[name]
        return np.frombuffer(t.data, KINDS[t.dtype]).reshape(t.shape).astype(np.float32)

    def stacked(names: str | tuple) -> np.ndarray:
        return array(names) if isinstance(names, str) else np.stack([stacked(n) for n in names])

    def leaf(spec: Spec) -> np.ndarray:
        x = stacked(spec.names)
        if spec.rows:
            x = x.reshape(spec.shape[0], -1, x.shape[-1])[:, slice(*spec.rows)]
        return x.reshape(spec.shape)

    return jax.tree.map(leaf, param_specs(cfg))


# One of each kind of attention and of each layout of tables.
FAST = ("v3", "mtp2", "tied", "glm46", "dsa_glm52")


@pytest.mark.parametrize("variant", apart([v for v in VARIANTS if "fp8" not in v], *FAST))
def test_values_are_those_of_the_files(variant: str):
    found = load(model_dir(variant))
    assert_same(found.params, plainly(model_dir(variant), found.config))


def store_as(t: Tensors, dtype: str) -> None:
    for name, raw in t.items():
        values = np.frombuffer(raw.data, "<f4").astype(KINDS[dtype])
        t[name] = Raw(dtype, raw.shape, values.tobytes())


@pytest.mark.parametrize("stored", ["BF16", "F16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pair_of_dtypes(tmp_path: Path, stored: str, dtype: str):
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: store_as(t, stored))
    found = load(folder, dtype=dtype)
    for spec, got, want in zip(
        jax.tree.leaves(param_specs(found.config)),
        jax.tree.leaves(found.params),
        jax.tree.leaves(plainly(folder, found.config)),
        strict=True,
    ):
        assert got.dtype == (jnp.float32 if spec.float32 else jnp.dtype(dtype))
        np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("dtype", apart(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("shape", [*apart([((1, 2),), ((4, 2),)]), (2, 2)])
@pytest.mark.parametrize("variant", ["v3", "fp8"])
def test_sharded(variant: str, shape: tuple[int, int], dtype: str):
    mesh = make_mesh(*shape)
    found = load(model_dir(variant), dtype=dtype, mesh=mesh)
    assert_same(found.params, load(model_dir(variant), dtype=dtype).params)
    specs = jax.tree.leaves(param_specs(found.config))
    for spec, array in zip(specs, jax.tree.leaves(found.params), strict=True):
        assert array.sharding.spec == partition(*spec.axes)


def test_mesh_that_does_not_divide():
    with pytest.raises(ConfigError, match="does not divide over 4 devices"):
        load(model_dir("v3"), mesh=make_mesh(1, 4))  # two heads


def test_progress_and_bytes():
    calls: list[tuple[int, int]] = []
    found = load(model_dir("v3"), progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    expected = sum(len(t.data) for t in read_folder(model_dir("v3")).values())
    assert list(done) == sorted(done)
    assert done[-1] == found.bytes_read == expected
    assert set(totals) == {expected}


def test_copies_that_differ_are_kept(tmp_path: Path):
    copy = "model.layers.3.shared_head.head.weight"
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.update({copy: t[EMBED]}))
    nextn = load(folder).params.nextn[0]
    assert nextn.embed is None
    np.testing.assert_array_equal(nextn.head, load(folder).params.embed)
    mesh = make_mesh(2, 2)
    assert_same(load(folder, mesh=mesh).params, load(folder).params)


def test_copies_in_another_dtype(tmp_path: Path):
    def change(t: Tensors) -> None:
        store_as(t, "BF16")
        for name in ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"):
            values = np.frombuffer(t[name].data, KINDS["BF16"]).astype("<f4")
            t[name] = Raw("F32", t[name].shape, values.tobytes())

    nextn = load(edit_tensors(model_dir("v3"), tmp_path / "model", change)).params.nextn[0]
    assert nextn.embed is None
    assert nextn.head is None


def test_tied_head_in_the_file(tmp_path: Path):
    folder = edit_tensors(
        model_dir("tied"), tmp_path / "model", lambda t: t.update({"lm_head.weight": t[EMBED]})
    )
    found = load(folder)
    assert found.params.head is None
    assert_same(found.params, load(model_dir("tied")).params)


def test_known_leftovers_are_ignored(tmp_path: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    leftover = {name: Raw("F32", [4], bytes(16)), "model.rotary_emb.inv_freq": Raw("F32", [4], bytes(16))}
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.update(leftover))
    assert_same(load(folder).params, load(model_dir("v3")).params)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_nextn_layers(count: int):
    found, whole = load(model_dir("mtp2"), num_nextn_layers=count), load(model_dir("mtp2"))
    assert found.config == whole.config.with_nextn((True,) * count)
    assert_same(found.params, replace(whole.params, nextn=whole.params.nextn[:count]))
    assert found.bytes_read < whole.bytes_read


def test_no_nextn_tensors_needed_for_none(tmp_path: Path):
    def strip(t: Tensors) -> None:
        for name in [n for n in t if n.startswith("model.layers.3.")]:
            del t[name]

    folder = edit_tensors(model_dir("v3"), tmp_path / "model", strip)
    assert load(folder, num_nextn_layers=0).config.num_nextn_predict_layers == 0
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    assert load(folder).params.nextn == ()


def test_config_silent_about_nextn(tmp_path: Path):
    folder = copy_folder(model_dir("mtp2"), tmp_path / "model")
    edit_json(folder / "config.json", num_nextn_predict_layers=None)
    assert load(folder).config.nextn_moe == (True, True)


@pytest.mark.parametrize("moe", [(False,), (True, False), (False, True)])
def test_dense_nextn_is_told_from_the_tensors(
    tmp_path: Path, moe: tuple[bool, ...], rng: np.random.Generator
):
    cfg = load(model_dir("v3")).config.with_nextn(moe)
    params = random_params(cfg, rng)
    save_checkpoint(tmp_path, cfg, params, "float32")
    edit_json(tmp_path / "config.json", nextn_moe=None)
    found = load(tmp_path)
    assert found.config.nextn_moe == moe
    assert [isinstance(n.layer.mlp, Moe) for n in found.params.nextn] == list(moe)
    assert_same(found.params, params)


def test_dense_model(tmp_path: Path, rng: np.random.Generator):
    cfg = replace(load(model_dir("v3")).config, n_routed_experts=0, first_k_dense_replace=3).with_nextn(
        (False,)
    )
    save_checkpoint(tmp_path, cfg, random_params(cfg, rng), "float32")
    found = load(tmp_path)
    assert all(isinstance(layer.mlp, Mlp) for layer in found.params.layers)
    assert found.config.nextn_moe == (False,)


def test_generation_config_decides_the_end_of_text(tmp_path: Path):
    folder = copy_folder(model_dir("v3"), tmp_path / "model")
    edit_json(folder / "generation_config.json", eos_token_id=[1, 7])
    assert load(folder).config.eos_token_ids == (1, 7)
    (folder / "generation_config.json").unlink()
    assert load(folder).config.eos_token_ids == (1,)


def test_the_other_dialect(tmp_path: Path):
    folder = copy_folder(model_dir("v3"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_scaling")
    rope |= {"rope_theta": raw.pop("rope_theta"), "rope_type": rope.pop("type")}
    raw |= {"rope_parameters": rope, "dtype": raw.pop("torch_dtype")}
    (folder / "config.json").write_text(json.dumps(raw))
    assert load(folder).config == load(model_dir("v3")).config
