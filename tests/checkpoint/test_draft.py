"""Draft folders: three layouts, the same NextN layer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_jax.checkpoint import export_nextn, load, summarise
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.errors import CheckpointError
from tests.checkpoint.files import Raw, Tensors, assert_same, copy_folder, edit_json, edit_tensors
from tests.golden import model_dir

LAYOUTS = {"model": "in place", "nextn": "lmsys NextN", "xllm_mtp": "xLLM export"}


def without_nextn(t: Tensors) -> None:
    for name in [n for n in t if n.startswith("model.layers.3.")]:
        del t[name]


@pytest.mark.parametrize("folder", LAYOUTS)
@pytest.mark.parametrize("stripped", [False, True])
def test_layouts(tmp_path: Path, folder: str, stripped: bool):
    model = model_dir("v3")
    if stripped:
        model = edit_tensors(model, tmp_path / "model", without_nextn)
    found = load(model, draft_model=model_dir("v3", folder))
    assert_same(found.params, load(model_dir("v3")).params)
    assert found.config == load(model_dir("v3")).config
    assert summarise(model, model_dir("v3", folder)).nextn_layout == LAYOUTS[folder]


@pytest.mark.parametrize("folder", ["nextn", "xllm_mtp"])
def test_single_file_without_index(tmp_path: Path, folder: str):
    draft = copy_folder(model_dir("v3", folder), tmp_path / "draft")
    (draft / INDEX).unlink()
    assert_same(load(model_dir("v3"), draft).params, load(model_dir("v3")).params)


def test_in_place_layers_alone(tmp_path: Path):
    def only_nextn(t: Tensors) -> None:
        for name in [n for n in t if not n.startswith("model.layers.3.")]:
            del t[name]

    draft = edit_tensors(model_dir("v3"), tmp_path / "draft", only_nextn)
    assert_same(load(model_dir("v3"), draft).params, load(model_dir("v3")).params)


def test_two_layers(tmp_path: Path):
    export_nextn(model_dir("mtp2"), tmp_path / "draft")
    whole = load(model_dir("mtp2"))
    found = load(model_dir("v3"), tmp_path / "draft")  # the same trunk, with one layer of its own
    assert found.config == whole.config
    assert_same(found.params, whole.params)


def test_bf16_draft_of_an_fp8_model(tmp_path: Path):
    found = load(model_dir("fp8"), model_dir("bf16"))
    assert_same(found.params.nextn[0], load(model_dir("bf16")).params.nextn[0])  # type: ignore[arg-type]


def test_layers_of_the_model_are_not_read_beside_a_draft(tmp_path: Path):
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.pop("model.layers.3.hnorm.weight"))
    assert_same(load(folder, model_dir("v3", "nextn")).params, load(model_dir("v3")).params)


def extra(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.update({name: Raw("F32", [1], bytes(4))})


DAMAGE: dict[str, tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = {
    "missing": (
        "nextn",
        lambda t: t.pop("model.layers.0.hnorm.weight"),
        ("missing (1): model.layers.3.hnorm.weight",),
    ),
    "missing in xLLM": (
        "xllm_mtp",
        lambda t: t.pop("model.hnorm.weight"),
        ("missing (1): model.layers.3.hnorm",),
    ),
    "unexpected": (
        "nextn",
        extra("model.other.weight"),
        ("unexpected (1): model.safetensors: model.other.weight",),
    ),
    "second block in xLLM": ("xllm_mtp", extra("model.layers.1.x"), ("unexpected (1)", "model.layers.1.x")),
    "shape": (
        "nextn",
        lambda t: t.update({"model.layers.0.enorm.weight": Raw("F32", [1], bytes(4))}),
        ("tensor model.layers.0.enorm.weight has shape [1]; expected [136]",),
    ),
    "no NextN layer": (
        "nextn",
        lambda t: [t.pop(n) for n in list(t) if "norm" in n or "eh_proj" in n],
        ("has no NextN layer for this model", "are nowhere", "model.layers.3 (in place)", "xLLM export"),
    ),
    "another layer": (
        "nextn",
        lambda t: t.update({n.replace("layers.0", "layers.7"): t.pop(n) for n in list(t)}),
        ("has no NextN layer for this model", "at layers 7", "model.layers.3 (in place)"),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str):
    folder, change, fragments = DAMAGE[kind]
    draft = edit_tensors(model_dir("v3", folder), tmp_path / "draft", change)
    with pytest.raises(CheckpointError) as caught:
        load(model_dir("v3"), draft)
    for fragment in (str(draft), *fragments):
        assert fragment in str(caught.value)


def test_draft_of_another_model(tmp_path: Path):
    draft = copy_folder(model_dir("v3", "nextn"), tmp_path / "draft")
    edit_json(draft / "config.json", hidden_size=128, rope_theta=500)
    with pytest.raises(CheckpointError) as caught:
        load(model_dir("v3"), draft)
    assert f"{draft} does not fit the model" in str(caught.value)
    assert "hidden_size is 128, the model's is 136" in str(caught.value)
    assert "rope_theta is 500.0, the model's is 10000.0" in str(caught.value)


def test_fp8_draft_that_does_not_say_so(tmp_path: Path):
    export_nextn(model_dir("fp8"), tmp_path / "draft")
    assert_same(load(model_dir("fp8"), tmp_path / "draft").params, load(model_dir("fp8")).params)
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw | {"quantization_config": ""}))
    with pytest.raises(CheckpointError, match="beside it has no quantization_config"):
        load(model_dir("fp8"), tmp_path / "draft")
