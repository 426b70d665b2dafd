"""New values for a model in memory: all of them fit and are read, or there is one error."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax.checkpoint import export_nextn, load, save
from mtp_jax.checkpoint.read import Loaded
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model.narrow import is_narrow, without_bits
from mtp_jax.model.params import shapes
from tests.checkpoint.files import assert_same, copy_folder, drop_nextn, edit_json, edit_tensors
from tests.golden import model_dir

V3 = model_dir("v3")
NORM = "model.norm.weight"
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(V3)


def arrays() -> Arrays:
    """The tensors of V3 by name."""
    return {n: t.array() for file in sorted(V3.glob("*.safetensors")) for n, t in open_file(file).items()}


def update(loaded: Loaded, source, draft_model=None, **options):
    return read_update(loaded.config, shapes(loaded.params), source, draft_model, dtype="float32", **options)


@pytest.mark.parametrize("source", [V3, arrays()], ids=["files", "arrays"])
def test_everything_is_read_to_the_host(loaded, source):
    new = update(loaded, source)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(new))
    assert_same(new, loaded.params)


def test_values_are_the_new_ones(loaded):
    changed = arrays()
    changed[NORM] = changed[NORM] * 2
    changed["model.layers.3.hnorm.weight"] = changed["model.layers.3.hnorm.weight"] * 3
    new = update(loaded, changed)
    np.testing.assert_array_equal(new.norm, np.asarray(loaded.params.norm) * 2)
    np.testing.assert_array_equal(
        new.nextn[0].hidden_norm, np.asarray(loaded.params.nextn[0].hidden_norm) * 3
    )


WRONG: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "missing": (lambda t: t.pop(NORM), f"missing (1): {NORM}"),
    "missing of the draft": (lambda t: t.pop("model.layers.3.hnorm.weight"), "model.layers.3.hnorm.weight"),
    "unread": (lambda t: t.update(x=t[NORM]), "unexpected (1): arrays: x"),
    "misshapen": (lambda t: t.update({NORM: t[NORM][:-1]}), "expected [136]"),
    "integers": (lambda t: t.update({NORM: t[NORM].astype(np.int32)}), "dtype I32"),
    "no tensor": (lambda t: t.update({NORM: np.array(["a"])}), "has dtype <U1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(loaded, case):
    change, message = WRONG[case]
    wrong = arrays()
    change(wrong)
    with pytest.raises(CheckpointError) as error:
        update(loaded, wrong)
    assert message in str(error.value)


def test_the_draft_comes_from_elsewhere_or_stays(loaded, tmp_path):
    trunk = edit_tensors(V3, tmp_path / "trunk", drop_nextn(V3))
    with pytest.raises(CheckpointError, match="missing"):
        update(loaded, trunk)
    export_nextn(V3, tmp_path / "nextn")
    assert_same(update(loaded, trunk, tmp_path / "nextn"), loaded.params)
    kept = update(loaded, trunk, keep_draft=True)
    assert kept.nextn == ()
    np.testing.assert_array_equal(kept.norm, np.asarray(loaded.params.norm))
    assert update(loaded, V3, keep_draft=True).nextn == ()  # there, and left where it is
    with pytest.raises(ConfigError, match="exclude each other"):
        update(loaded, trunk, tmp_path / "nextn", keep_draft=True)


def test_tables_that_memory_shares_stay_shared(loaded, tmp_path):
    name = "model.layers.3.embed_tokens.weight"
    assert name in arrays()  # a copy of the trunk's, so that memory holds it once
    changed = arrays() | {name: arrays()[name] + 1}
    with pytest.raises(CheckpointError, match=f"{name}: differs from the trunk's"):
        update(loaded, changed)
    shared = arrays()
    del shared[name]
    assert_same(update(loaded, shared), loaded.params)


def test_tables_of_its_own_may_be_left_out(tmp_path):
    name = "model.layers.3.embed_tokens.weight"
    own = load(edit_tensors(V3, tmp_path / "own", lambda t: t.update({name: t[name].filled(0)})))
    assert own.params.nextn[0].embed is not None
    new = update(own, V3)
    np.testing.assert_array_equal(new.nextn[0].embed, new.embed)
    shared = arrays()
    del shared[name]
    np.testing.assert_array_equal(update(own, shared).nextn[0].embed, new.embed)


def test_another_model_is_refused(loaded, tmp_path):
    other = copy_folder(V3, tmp_path / "other")
    edit_json(other / "config.json", rope_theta=7.0)
    with pytest.raises(CheckpointError, match=r"rope_theta is 7\.0, the loaded model's is"):
        update(loaded, other)
    (other / "config.json").unlink()
    assert_same(update(loaded, other), loaded.params)  # tensors alone say nothing else


def test_an_orbax_folder_is_refused(loaded, tmp_path):
    save(tmp_path / "orbax", loaded.config, loaded.params)
    with pytest.raises(CheckpointError, match="Orbax folder"):
        update(loaded, tmp_path / "orbax")


def test_fp8_in_memory_takes_fp8_alone():
    kept = load(model_dir("fp8"), narrow="keep")
    plain = jax.tree.map(without_bits, kept.params, is_leaf=is_narrow)
    assert_same(update(kept, model_dir("fp8")), plain)
    with pytest.raises(CheckpointError, match="parameters do not fit"):
        update(kept, _dequantised())


def test_fp8_files_fill_wide_parameters():
    wide = load(model_dir("fp8"))
    assert_same(update(wide, model_dir("fp8")), wide.params)
    assert_same(update(wide, _dequantised()), wide.params)


def _dequantised() -> Arrays:
    """The FP8 variant's tensors as float32."""
    found: Path = model_dir("fp8")
    tensors = {n: t for file in sorted(found.glob("*.safetensors")) for n, t in open_file(file).items()}
    wide = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.array().astype(np.float32)
        if tensor.dtype == "F8_E4M3":
            scale = np.kron(tensors[f"{name}_scale_inv"].array(), np.ones((128, 128), np.float32))
            value = value * scale[: value.shape[0], : value.shape[1]]
        wide[name] = value
    return wide


def test_files_that_a_trainer_writes_anew_meanwhile_refuse_the_update(loaded, tmp_path, monkeypatch):
    """In place, which truncates them first: a mapped file would end the process."""
    folder, read, reads = copy_folder(V3, tmp_path / "model"), os.preadv, []

    def truncating(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == 40:  # in the midst of the tensors
            for file in folder.glob("*.safetensors"):
                os.truncate(file, 0)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncating)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        update(loaded, folder)
    assert len(reads) >= 40
