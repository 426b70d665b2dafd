"""FP8 and FP4 as llm-compressor writes them: the arrays of the release's format, under other names."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoint import export_nextn, load
from mtp_jax.checkpoint.read import Loaded
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError
from mtp_jax.model.narrow import Fp8, Int4, is_narrow
from mtp_jax.model.params import Params, shapes
from tests import v4
from tests.checkpoint.compressed import BLOCKS, MXFP4, renamed
from tests.checkpoint.files import Raw, Tensors, assert_same, edit_json, edit_tensors, read_folder, write_raw
from tests.checkpoint.int4_files import QUANTISATION, raw, write_models
from tests.golden import model_dir

FP8 = model_dir("fp8")
QUERIES = "model.layers.1.self_attn.q_a_proj.weight"


def written(to: Path, change: Callable[[Tensors], object] = lambda tensors: None, source: Path = FP8) -> Path:
    """The folder as llm-compressor writes it. change: of its tensors, under llm-compressor's names."""

    def edit(tensors: Tensors) -> None:
        renamed(tensors)
        change(tensors)

    folder = edit_tensors(source, to, edit)
    edit_json(folder / "config.json", quantization_config=BLOCKS)
    return folder


def same(a: Params, b: Params) -> None:
    """Equal trees, narrow weights and their scales included."""
    for x, y in zip(*(jax.tree.leaves(p, is_leaf=is_narrow) for p in (a, b)), strict=True):
        assert type(x) is type(y)
    assert_same(a, b)


@pytest.fixture(scope="module")
def released() -> Loaded:
    return load(FP8, narrow="keep")


def test_the_same_arrays_as_the_release(released, tmp_path):
    folder = written(tmp_path / "model")
    kept = load(folder, narrow="keep")
    assert any(isinstance(w, Fp8) for w in jax.tree.leaves(kept.params, is_leaf=is_narrow))
    same(kept.params, released.params)
    assert_same(load(folder).params, load(FP8).params)
    assert kept.bytes_read == released.bytes_read
    export_nextn(folder, tmp_path / "nextn")
    same(load(folder, tmp_path / "nextn", narrow="keep").params, released.params)
    new = read_update(released.config, shapes(released.params), folder, dtype="float32")
    assert_same(new, read_update(released.config, shapes(released.params), FP8, dtype="float32"))


def test_scales_in_bfloat16(tmp_path):
    def rounded(tensor: Raw) -> np.ndarray:
        return np.frombuffer(tensor.data, "<f4").astype(ml_dtypes.bfloat16)

    def change(tensors: Tensors, wide: bool) -> None:
        for name in [n for n in tensors if n.endswith(("_scale", "_scale_inv"))]:
            values = rounded(tensors[name])
            tensors[name] = replace(raw(values.astype("<f4") if wide else values), shape=tensors[name].shape)

    short = written(tmp_path / "short", lambda t: change(t, wide=False))
    long = edit_tensors(FP8, tmp_path / "long", lambda t: change(t, wide=True))
    same(load(short, narrow="keep").params, load(long, narrow="keep").params)


def test_nextn_layers_in_bfloat16(released, tmp_path):
    """The tensors say so; the values are the same where they are bfloat16's."""

    def widened(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.3.") and n.endswith(".weight_scale")]:
            tensors.pop(name)
            values = tensors[name.removesuffix("_scale")]
            wide = np.frombuffer(values.data, ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
            tensors[name.removesuffix("_scale")] = Raw("BF16", values.shape, wide.tobytes())

    found = load(written(tmp_path / "model", widened), narrow="keep")
    same(found.params.with_drafts(), released.params.with_drafts())
    layer = found.params.nextn[0].layer
    assert not any(isinstance(w, Fp8) for w in jax.tree.leaves(layer, is_leaf=is_narrow))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{QUERIES}_scale"), rf"missing \(1\): {QUERIES}_scale_inv"),
        (
            lambda t: t.update({f"{QUERIES}_scale": replace(t[f"{QUERIES}_scale"], shape=[2, 1])}),
            rf"tensor {QUERIES}_scale is F32 \[2, 1\]; expected F32 or BF16 \[1, 2\]",
        ),
        (
            lambda t: t.update({f"{QUERIES}_scale_inv": t[f"{QUERIES}_scale"]}),
            rf"{QUERIES}_scale_inv is also there as {QUERIES}_scale",
        ),
    ],
    ids=["no scale", "other blocks", "twice"],
)
def test_scales_that_do_not_fit(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(written(tmp_path / "model", change))


def test_fp8_beside_int4(tmp_path):
    """Attention in FP8, experts in int4, each as it is alone."""
    models = write_models(tmp_path)
    tensors = read_folder(models.packed)
    groups = {
        "attention": BLOCKS["config_groups"]["group_0"],
        "experts": QUANTISATION["config_groups"]["group_0"] | {"format": "pack-quantized"},
    }
    plain = read_folder(models.plain)
    for name in [n for n in tensors if n.endswith("o_proj.weight")]:
        w = np.frombuffer(tensors[name].data, np.float32).reshape(tensors[name].shape)
        values = (w * 64).astype(ml_dtypes.float8_e4m3fn)
        blocks = [-(-n // 128) for n in w.shape]
        tensors[name] = raw(values)
        tensors[f"{name}_scale"] = raw(np.full(blocks, 1 / 64, np.float32))
        plain[name] = raw(values.astype(np.float32) / 64)
    write_raw(models.packed / "model.safetensors", tensors)
    write_raw(models.plain / "model.safetensors", plain)
    quant = BLOCKS | {"format": "mixed-precision", "config_groups": groups}
    edit_json(models.packed / "config.json", quantization_config=quant)
    found = jax.tree.leaves(load(models.packed, narrow="keep").params, is_leaf=is_narrow)
    assert {type(w) for w in found if is_narrow(w)} == {Fp8, Int4}
    assert_same(load(models.packed, narrow="dequantise").params, load(models.plain).params)


def test_mxfp4_experts_in_a_group_of_their_own(tmp_path):
    """DeepSeek-V4 with attention in FP8, from bytes of uint8 and the names of either."""
    config = v4.v4_config(num_hidden_layers=2, compress_ratios=[4, 128, 0])
    v4.write_v4(tmp_path / "release", config, v4.v4_tensors(config), fp4=True)
    tensors = read_folder(tmp_path / "release")
    for name in [n for n in tensors if n.endswith(".scale")]:
        scale, weight = tensors.pop(name), f"{name.removesuffix('scale')}weight"
        if tensors[weight].dtype == "I8":
            tensors[f"{weight}_packed"] = replace(tensors.pop(weight), dtype="U8")
            scale = replace(scale, dtype="U8")
        tensors[f"{weight}_scale"] = scale
    (tmp_path / "copy").mkdir()
    write_raw(tmp_path / "copy" / "model.safetensors", tensors)
    told = json.loads((tmp_path / "release" / "config.json").read_text())
    told.pop("expert_dtype")
    groups = {"attention": BLOCKS["config_groups"]["group_0"], "experts": MXFP4}
    told["quantization_config"] = BLOCKS | {"format": "mixed-precision", "config_groups": groups}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(told))
    same(load(tmp_path / "copy", narrow="keep").params, load(tmp_path / "release", narrow="keep").params)
