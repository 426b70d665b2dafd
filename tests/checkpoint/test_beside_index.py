"""Draft layers in files beside the index, as tools that quantise a model copy them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_jax.checkpoint import load, summarise
from mtp_jax.checkpoint.digest import folder_digest
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.errors import CheckpointError
from tests import v4
from tests.checkpoint.files import Tensors, assert_same, copy_folder, read_folder, read_raw, write_raw
from tests.golden import model_dir

V3 = model_dir("v3")
DRAFT = "model.layers.3."


def apart(to: Path, *files: str, index: bool = True, source: Path = V3, prefix: str = DRAFT) -> Path:
    """A copy whose draft layers lie in these files, in turn, and not in the index."""
    to.mkdir()
    for path in source.glob("*.json"):
        if path.name != INDEX:
            (to / path.name).write_bytes(path.read_bytes())
    tensors = read_folder(source)
    trunk = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    drafts = sorted(n for n in tensors if n.startswith(prefix))
    write_raw(to / "model.safetensors", trunk)
    for i, file in enumerate(files):
        write_raw(to / file, {n: tensors[n] for n in drafts[i :: len(files)]})
    if index:
        (to / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(trunk, "model.safetensors")}))
    return to


@pytest.mark.parametrize("index", [True, False], ids=["an index", "one file"])
@pytest.mark.parametrize("files", [("mtp.safetensors",), ("nextn-1.safetensors", "nextn-2.safetensors")])
def test_nextn_layers_beside_the_index(files: tuple[str, ...], index: bool, tmp_path: Path):
    folder = apart(tmp_path / "model", *files, index=index)
    found, want = load(folder), load(V3)
    assert found.config == want.config
    assert_same(found.params, want.params)
    assert found.bytes_read == want.bytes_read
    assert folder_digest(folder, weights=True) == folder_digest(V3, weights=True)
    assert load(folder, num_nextn_layers=0).config.num_nextn_predict_layers == 0


def test_layers_of_deepseek_v4_beside_the_index(tmp_path: Path):
    config = v4.v4_config(num_hidden_layers=2, compress_ratios=[4, 128, 0])
    v4.write_v4(tmp_path / "whole", config, v4.v4_tensors(config))
    folder = apart(tmp_path / "model", "mtp.safetensors", source=tmp_path / "whole", prefix="mtp.")
    assert_same(load(folder).params, load(tmp_path / "whole").params)


def test_a_draft_of_which_the_index_has_a_part(tmp_path: Path):
    folder = apart(tmp_path / "model", "a.safetensors", "b.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(read_raw(folder / "a.safetensors"), "a.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    assert_same(load(folder).params, load(V3).params)


def adapter(folder: Path) -> Tensors:
    norm = read_raw(folder / "model.safetensors")["model.norm.weight"]
    return {"model.layers.1.self_attn.o_proj.lora_A.weight": norm}


LEFT_OUT: dict[str, Callable[[Path], Tensors]] = {
    "a copy of the model": lambda folder: read_raw(folder / "model.safetensors"),
    "an export of the same layer": lambda folder: read_folder(model_dir("v3", "nextn")),
    "an adapter": adapter,
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_other_files_are_left_out(kind: str, tmp_path: Path):
    folder = apart(tmp_path / "model", "mtp.safetensors")
    write_raw(folder / "other.safetensors", LEFT_OUT[kind](folder))
    assert_same(load(folder).params, load(V3).params)


def test_a_tensor_in_two_files_is_named(tmp_path: Path):
    folder = apart(tmp_path / "model", "mtp.safetensors")
    (folder / "nextn.safetensors").write_bytes((folder / "mtp.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match=rf"nextn\.safetensors: tensor {DRAFT}\S+ is also in mtp\.safet"
    ):
        summarise(folder)


def test_files_that_are_missing_are_named(tmp_path: Path):
    """An index may name the draft's file, which was not downloaded; or nothing has the layer at all."""
    folder = apart(tmp_path / "model", "mtp.safetensors")
    names = read_raw(folder / "mtp.safetensors")
    (folder / "mtp.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"tensors of 0 NextN layers are present \(model\.layers\.3\.en"
    ):
        load(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(names, "mtp.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"shards that .* names are missing: mtp\.safetensors"):
        load(folder)
    whole = copy_folder(V3, tmp_path / "whole")
    (whole / "mtp.safetensors").write_bytes(b"damaged")
    assert_same(load(whole).params, load(V3).params)
