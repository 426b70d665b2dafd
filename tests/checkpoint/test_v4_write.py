"""DeepSeek-V4's parameters written, exported and updated: what is read again is equal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, convert, export_nextn, load, save_checkpoint, save_drafter, summarise
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.narrow import Fp4, is_narrow, without_bits
from mtp_jax.model.params import Params, shapes
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.files import Tensors, assert_same, copy_folder, edit_json, edit_tensors, read_folder
from tests.models import apart
from tests.v4 import DSPARK, v4_config, v4_tensors, write_v4

CONFIG = v4_config(num_hidden_layers=2, compress_ratios=[4, 128, 0])


STAGED = CONFIG | DSPARK | {"dspark_target_layer_ids": [0, 1]}
KINDS = ["plain", "fp4", "dspark"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("v4") / name for name in KINDS}
    for name, folder in found.items():
        config = STAGED if name == "dspark" else CONFIG
        write_v4(folder, config, v4_tensors(config), fp4=name != "plain")
    return found


fp4_or_more = pytest.mark.parametrize("name", apart(KINDS, "fp4"))


@pytest.mark.parametrize("name", KINDS)
def test_all_of_it_comes_back(folders: dict[str, Path], tmp_path: Path, name: str):
    before = load(folders[name], narrow="dequantise")
    save_checkpoint(tmp_path, before.config, before.params, "float32", 200_000)
    after = load(tmp_path)
    assert_same(after.params, before.params)
    assert after.config == replace(before.config, dtype="float32", fp8=False, fp4=False)
    files, written = read_folder(folders[name]), read_folder(tmp_path)
    assert written.keys() == {n for n in files if not n.endswith(".scale")}
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    if name == "plain":
        table = written.pop("layers.0.ffn.gate.tid2eid")
        assert (table.dtype, table.shape) == ("I32", [64, 2])
        assert all(files[n] == t for n, t in written.items())


def test_narrow_weights_come_back_in_bfloat16_with_all_their_bits(folders: dict[str, Path], tmp_path: Path):
    narrow = load(folders["fp4"])
    with pytest.raises(CheckpointError, match="in fp4 are not written; load with narrow='dequantise'"):
        save_checkpoint(tmp_path, narrow.config, narrow.params)
    wide = load(folders["fp4"], narrow="dequantise")
    save_checkpoint(tmp_path, wide.config, wide.params, "bfloat16")
    assert_same(load(tmp_path).params, wide.params)
    router = read_folder(tmp_path)["layers.0.ffn.gate.weight"]
    assert router.dtype == "F32"


@fp4_or_more
def test_orbax(folders: dict[str, Path], tmp_path: Path, name: str):
    convert(folders[name], tmp_path / "orbax", dtype="float32")
    want = load(folders[name], narrow="dequantise")
    for mesh in (None, make_mesh(2, 2)):
        assert_same(load(tmp_path / "orbax", mesh=mesh).params, want.params)
    assert load(tmp_path / "orbax").config.drafter == want.config.drafter
    trunk = load(tmp_path / "orbax", num_nextn_layers=0)
    assert_same(trunk.params, want.params.with_drafts())
    summary = summarise(tmp_path / "orbax")
    assert (summary.architecture, summary.nextn_layout) == ("deepseek_v4", "Orbax")
    assert summary.weight_bytes["float32"] == sum(a.nbytes for a in jax.tree.leaves(want.params))


@pytest.mark.rest
def test_orbax_of_a_trunk_whose_drafter_is_left_out(folders: dict[str, Path], tmp_path: Path):
    convert(folders["dspark"], tmp_path / "orbax", num_nextn_layers=0, dtype="float32")
    trunk = load(folders["dspark"], num_nextn_layers=0, narrow="dequantise")
    assert_same(load(tmp_path / "orbax").params, trunk.params)


@fp4_or_more
def test_mtp_layers_are_exported(folders: dict[str, Path], tmp_path: Path, name: str):
    export_nextn(folders[name], tmp_path / "mtp")
    whole, part = read_folder(folders[name]), read_folder(tmp_path / "mtp")
    assert part == {n: t for n, t in whole.items() if n.startswith("mtp.")}
    assert read_json(tmp_path / "mtp" / "config.json")["architectures"] == ["DeepseekV4ForCausalLMNextN"]

    def no_drafts(tensors: Tensors) -> None:
        for n in part:
            del tensors[n]

    trunk = edit_tensors(folders[name], tmp_path / "trunk", no_drafts)
    assert_same(load(trunk, tmp_path / "mtp").params, load(folders[name]).params)


@pytest.mark.parametrize("name", apart(["fp4", "dspark"], "dspark"))
def test_a_drafter_comes_back_alone(folders: dict[str, Path], tmp_path: Path, name: str):
    before = load(folders[name], dtype="bfloat16", narrow="dequantise")
    save_drafter(tmp_path, before.config, before.params, read_json(folders[name] / "config.json"))
    assert all(name.startswith("mtp.") for name in read_folder(tmp_path))
    after = load(folders[name], tmp_path, dtype="bfloat16", narrow="dequantise")
    assert after.config.drafter == before.config.drafter
    assert_same(after.params, before.params)


def bare(params: Params) -> Params:
    return jax.tree.map(without_bits, params, is_leaf=is_narrow)


def update(loaded: Loaded, source: Any, **options: Any) -> Params:
    return read_update(loaded.config, shapes(loaded.params), source, dtype="float32", **options)


@pytest.mark.parametrize(
    ("narrow", "name"),
    apart([(None, "fp4"), ("keep", "fp4"), ("dequantise", "fp4"), (None, "dspark")], (None, "fp4")),
)
def test_updates(folders: dict[str, Path], tmp_path: Path, narrow: Any, name: str):
    loaded = load(folders[name], narrow=narrow)
    file = folders[name] / "model.safetensors"
    arrays = {name: tensor.array() for name, tensor in open_file(file).items()}
    for source in (folders[name], arrays):
        assert_same(update(loaded, source), bare(loaded.params))
    other, config = tmp_path / "other", read_json(folders[name] / "config.json")
    write_v4(other, config, v4_tensors(config, seed=1), fp4=True)
    assert_same(update(loaded, other), bare(load(other, narrow=narrow).params))
    trunk = {name: a for name, a in arrays.items() if not name.startswith("mtp.")}
    assert_same(update(loaded, trunk, keep_draft=True), bare(loaded.params).with_drafts())


def test_updates_that_do_not_fit(folders: dict[str, Path], tmp_path: Path):
    loaded = load(folders["fp4"])
    assert isinstance(loaded.params.layers[0].mlp.down, Fp4)
    with pytest.raises(CheckpointError, match=r"18 parameters do not fit: .*mlp\.down would be"):
        update(loaded, folders["plain"])
    arrays = {name: t.array() for name, t in open_file(folders["fp4"] / "model.safetensors").items()}
    arrays["layers.0.ffn.gate.tid2eid"] = arrays["layers.0.ffn.gate.tid2eid"] + 7
    with pytest.raises(CheckpointError, match=r"tid2eid gives token \d+ expert \d+; expected 0 to 7"):
        update(loaded, arrays)
    del arrays["layers.0.ffn.experts.0.w1.scale"]
    with pytest.raises(CheckpointError, match=r"missing \(1\): layers\.0\.ffn\.experts\.0\.w1\.scale"):
        update(loaded, arrays)
    config = CONFIG | {"sliding_window": 8}
    write_v4(tmp_path / "other", config, v4_tensors(config), fp4=True)
    with pytest.raises(
        CheckpointError, match=r"another model: compressed\.window is 8, the loaded model's is \d+$"
    ):
        update(loaded, tmp_path / "other")


def test_updates_of_other_stages(folders: dict[str, Path], tmp_path: Path):
    loaded = load(folders["dspark"])
    folder = copy_folder(folders["dspark"], tmp_path / "other")
    edit_json(folder / "config.json", dspark_block_size=3)
    with pytest.raises(
        CheckpointError, match=r"does not fit the loaded drafter, .*block=4.*: it is .*block=3"
    ):
        update(loaded, folder)
    with pytest.raises(CheckpointError, match="does not fit the loaded drafter"):
        update(loaded, folders["fp4"])


def test_bfloat16_values_are_rounded_once(folders: dict[str, Path]):
    wide, half = (load(folders["fp4"], dtype=d, narrow="dequantise").params for d in ("float32", "bfloat16"))
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(half), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(b.dtype), b)
