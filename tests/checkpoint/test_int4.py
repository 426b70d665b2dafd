"""Packed int4 checkpoints: every tensor accounted for, described, updated, and written on or refused."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax.checkpoint import convert, export_nextn, load, save, save_checkpoint, summarise
from mtp_jax.checkpoint.read import Loaded
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError
from mtp_jax.model.narrow import Int4
from mtp_jax.model.params import shapes
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.files import (
    Raw,
    Tensors,
    assert_same,
    copy_folder,
    edit_json,
    edit_tensors,
    read_folder,
)
from tests.checkpoint.int4_files import VISION, Models, edit_quantisation, raw, write_models

# [32, 64]; in words [32, 8], with scales [32, 2].
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("int4"))


@pytest.fixture(scope="module")
def packed(models: Models) -> Loaded:
    return load(models.packed)


def shorter(name: str) -> Callable[[Tensors], None]:
    """A change: one row less."""

    def change(tensors: Tensors) -> None:
        t = tensors[name]
        rows = t.shape[0]
        tensors[name] = Raw(t.dtype, [rows - 1, *t.shape[1:]], t.data[: len(t.data) // rows * (rows - 1)])

    return change


def plain_too(tensors: Tensors) -> None:
    tensors[UP] = raw(np.zeros((32, 64), np.float32))


def packed_head(tensors: Tensors) -> None:
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight")


WRONG: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "no words": (
        lambda t: t.pop(f"{UP}_packed"),
        (f"missing (1): {UP}", "unexpected (2)", f"{UP}_scale, {UP}_shape"),
    ),
    "no scale": (lambda t: t.pop(f"{UP}_scale"), (f"missing (1): {UP}_scale",)),
    "no shape": (lambda t: t.pop(f"{UP}_shape"), (f"missing (1): {UP}_shape",)),
    "an array too": (plain_too, (f"unexpected (1): model.safetensors: {UP}",)),
    "zero points": (
        lambda t: t.update({f"{UP}_zero_point": raw(np.zeros((4, 2), np.int32))}),
        (f"unexpected (1): model.safetensors: {UP}_zero_point",),
    ),
    "an order": (
        lambda t: t.update({UP.replace("weight", "weight_g_idx"): raw(np.zeros(64, np.int32))}),
        ("unexpected (1)", "weight_g_idx"),
    ),
    "a table": (packed_head, ("missing (1): lm_head.weight", "unexpected (1)", "lm_head.weight_packed")),
    "fewer words": (
        shorter(f"{UP}_packed"),
        (f"{UP}_packed is I32 [31, 8]; expected I32 [32, 8]: eight values a word of [32, 64]",),
    ),
    "fewer scales": (
        shorter(f"{UP}_scale"),
        (f"{UP}_scale is BF16 [31, 2]; expected F32 or BF16 or F16 [32, 2]: one scale per 32 inputs",),
    ),
    "bytes": (
        lambda t: t.update({f"{UP}_packed": raw(np.zeros((32, 8), np.uint8))}),
        (f"{UP}_packed is U8 [32, 8]; expected I32 [32, 8]",),
    ),
    "another shape": (
        lambda t: t.update({f"{UP}_shape": raw(np.array([32, 60]))}),
        (f"{UP}_shape is [32, 60]; expected [32, 64] from {UP}_packed",),
    ),
    "no number": (
        lambda t: t.update({f"{UP}_scale": raw(np.full((32, 2), np.nan, np.float32))}),
        (f"{UP}_scale has NaN or infinite scales",),
    ),
}


@pytest.mark.parametrize("narrow", ["keep", pytest.param("dequantise", marks=pytest.mark.rest)])
@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit(models, tmp_path, case, narrow):
    change, fragments = WRONG[case]
    folder = edit_tensors(models.packed, tmp_path / "model", change)
    with pytest.raises(CheckpointError) as error:
        load(folder, narrow=narrow)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_a_config_that_does_not_fit(models, tmp_path):
    folder = copy_folder(models.packed, tmp_path / "none")
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match="beside it has no quantization_config of int4"):
        load(folder)
    folder = copy_folder(models.packed, tmp_path / "smaller")
    edit_quantisation(folder, group_size=16)
    with pytest.raises(CheckpointError, match=r"expected F32 or BF16 or F16 \[32, 4\]: one scale per 16"):
        load(folder)
    folder = copy_folder(models.plain, tmp_path / "plain")
    told = json.loads((models.packed / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", quantization_config=told)
    with pytest.raises(CheckpointError, match="announces int4, but no tensor is called weight_packed"):
        load(folder)


def test_inputs_that_groups_do_not_divide(tmp_path):
    """Of a layer that is no expert: those are checked with the config."""
    models = write_models(tmp_path, 16, packs=lambda n: n.endswith("mlp.down_proj.weight"))
    assert isinstance(load(models.packed).params.layers[0].mlp.down, Int4)
    edit_quantisation(models.packed, group_size=32)
    with pytest.raises(CheckpointError, match="48 inputs are no multiple of 32, for 32 in a group"):
        load(models.packed)


def test_the_text_part_of_a_multimodal_checkpoint(models, packed, tmp_path):
    found = load(models.nested)
    assert found.config == packed.config
    assert_same(found.params, packed.params)
    summary = summarise(models.nested)
    assert {n: (s.tensors, s.nbytes) for n, s in summary.unread.items()} == {
        "vision_tower": (2, 48),
        "mm_projector": (1, 16),
    }
    text = "not read            vision_tower (2 tensors, 48 B), mm_projector (1 tensors, 16 B)"
    assert text in summary.text()
    alone = summarise(models.packed)
    assert "not read" not in alone.text()
    assert summary.stored == alone.stored

    def change(tensors: Tensors) -> None:
        tensors["audio_tower.weight"] = tensors["mm_projector.proj.0.weight"]

    with pytest.raises(CheckpointError, match=r"unexpected \(1\): model\.safetensors: audio_tower\.weight"):
        load(edit_tensors(models.nested, tmp_path / "audio", change))
    with pytest.raises(CheckpointError, match=r"unexpected \(3\): .*vision_tower"):
        load(edit_tensors(models.packed, tmp_path / "no prefix", lambda t: t.update(VISION)))
    both = edit_tensors(
        models.nested,
        tmp_path / "both",
        lambda t: t.update({"model.norm.weight": t["language_model.model.norm.weight"]}),
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is also there as"):
        load(both)


def test_bytes_of_weights(models, packed):
    summary = summarise(models.packed, devices=8)
    assert summary.weight_bytes["int4"] == sum(
        a.nbytes for a in jax.tree.leaves(load(models.packed, dtype="bfloat16").params)
    )
    assert summary.weight_bytes["float32"] == sum(
        a.nbytes for a in jax.tree.leaves(load(models.plain).params)
    )
    assert summary.weight_bytes["int4"] < summary.weight_bytes["bfloat16"]
    split = load(models.packed, dtype="bfloat16", mesh=make_mesh(1, 8)).params
    on_first = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(split))
    assert summary.weight_bytes_per_device["int4"] == on_first
    assert summary.parameters == summarise(models.plain).parameters
    on_disk = sum(len(t.data) for t in read_folder(models.packed).values())
    assert summary.stored_bytes == packed.bytes_read == on_disk


def test_bytes_from_a_config_alone(models, tmp_path):
    """Which takes experts alone to be packed, and their scales bfloat16."""
    (tmp_path / "config.json").write_bytes((models.nested / "config.json").read_bytes())
    assert summarise(tmp_path).weight_bytes == summarise(models.packed).weight_bytes


def test_progress_counts_every_tensor(models):
    seen: list[tuple[int, int]] = []
    load(models.packed, progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] == summarise(models.packed).stored_bytes


def test_packed_weights_are_not_written(packed, tmp_path):
    for write in (save, save_checkpoint):
        with pytest.raises(CheckpointError, match="int4 are not written; load with narrow='dequantise'"):
            write(tmp_path / "out", packed.config, packed.params)


def test_orbax_holds_them_dequantised(models, tmp_path):
    convert(models.nested, tmp_path / "orbax", dtype="float32")
    assert_same(load(tmp_path / "orbax").params, load(models.plain).params)


def test_nextn_layers_are_exported_as_they_are(models, packed, tmp_path):
    """And drafts of another form than the trunk's go along with it."""
    export_nextn(models.nested, tmp_path / "packed")
    export_nextn(models.plain, tmp_path / "plain")
    names = read_folder(tmp_path / "packed")
    assert "model.layers.0.mlp.experts.0.up_proj.weight_packed" in names
    assert_same(load(models.packed, tmp_path / "packed").params, packed.params)
    mixed = load(models.plain, tmp_path / "packed").params
    assert isinstance(mixed.nextn[0].layer.mlp.down, Int4)
    assert not isinstance(mixed.layers[1].mlp.down, Int4)
    assert not isinstance(load(models.packed, tmp_path / "plain").params.nextn[0].layer.mlp.down, Int4)


def test_updates(models, packed):
    """Packed weights take packed ones, from files and arrays; wide ones take either."""

    def update(loaded: Loaded, source):
        return read_update(loaded.config, shapes(loaded.params), source, dtype="float32")

    def arrays(folder: Path) -> dict[str, np.ndarray]:
        return {n: t.array() for n, t in open_file(folder / "model.safetensors").items()}

    for source in (models.packed, models.nested, arrays(models.packed), arrays(models.nested)):
        assert_same(update(packed, source), packed.params)
    for source in (models.plain, arrays(models.plain)):
        with pytest.raises(CheckpointError, match=r"parameters do not fit: .*mlp\.down"):
            update(packed, source)
    wide = load(models.packed, narrow="dequantise")
    for source in (models.packed, models.plain, arrays(models.packed), arrays(models.plain)):
        assert_same(update(wide, source), wide.params)


def test_the_writer_of_these_tests(models):
    """Both ends of the range are there, and negative words."""
    found = (t.data for name, t in read_folder(models.packed).items() if name.endswith("_packed"))
    words = np.frombuffer(b"".join(found), np.int32)
    assert {int(v) for s in range(0, 32, 4) for v in (words >> s) & 15} == set(range(16))
    assert words.min() < 0 < words.max()
