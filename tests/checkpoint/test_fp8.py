"""FP8 blocks: fixed 128x128, partial at the edges, any rectangle of them."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.checkpoint import load
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.checkpoint.fp8 import blocks, dequantise, scale_shape
from mtp_jax.checkpoint.update import read_update
from mtp_jax.model.narrow import is_narrow, without_bits
from mtp_jax.model.params import shapes
from mtp_jax.model.spec import may_be_narrow
from tests.checkpoint.files import (
    Raw,
    Tensors,
    assert_same,
    copy_folder,
    edit_json,
    edit_tensors,
    read_folder,
    write_raw,
)
from tests.golden import model_dir

SHAPES = [(1, 1), (128, 128), (127, 129), (300, 200), (576, 130), (192, 256)]


def random_fp8(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    weight = rng.uniform(-448, 448, shape).astype(ml_dtypes.float8_e4m3fn)
    return weight, rng.uniform(0.01, 2, scale_shape(shape)).astype(np.float32)


def plainly(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    out = weight.astype(np.float32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] *= scale[i // 128, j // 128]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_whole_weights(shape: tuple[int, int], dtype: type):
    weight, scale = random_fp8(shape)
    out = np.empty(shape, dtype)
    dequantise(weight, scale, 0, range(shape[1]), out)
    np.testing.assert_array_equal(out, plainly(weight, scale).astype(dtype))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=2),
    st.lists(st.integers(0, 200), min_size=2, max_size=2),
)
def test_any_rectangle(rows: list[int], columns: list[int]):
    weight, scale = random_fp8((300, 200))
    (top, bottom), (left, right) = sorted(rows), sorted(columns)
    out = np.empty((bottom - top, right - left), np.float32)
    within = blocks(range(top, bottom))
    dequantise(weight[top:bottom], scale[within.start : within.stop], top % 128, range(left, right), out)
    expected = weight.astype(np.float32) * scale.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    np.testing.assert_array_equal(out, expected[top:bottom, left:right])


def test_every_code():
    weight = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(1, 256)
    out = np.empty((1, 256), np.float32)
    dequantise(weight, np.ones((1, 2), np.float32), 0, range(256), out)
    np.testing.assert_array_equal(out, weight.astype(np.float32))


def test_which_tensors_may_be_fp8():
    p = "model.layers.3"
    yes = [
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.q_proj",
        "mlp.experts.0.up_proj",
        "mlp.shared_experts.down_proj",
    ]
    no = [
        "eh_proj",
        "mlp.gate",
        "input_layernorm",
        "embed_tokens",
        "shared_head.head",
        "self_attn.kv_a_layernorm",
    ]
    assert all(may_be_narrow(f"{p}.{name}.weight") for name in yes)
    assert not any(may_be_narrow(f"{p}.{name}.weight") for name in [*no])
    assert not may_be_narrow("lm_head.weight")


def test_scales_in_another_shard(tmp_path: Path):
    folder = copy_folder(model_dir("fp8"), tmp_path / "model")
    tensors = read_folder(folder)
    (folder / "model.safetensors").unlink()
    shards = ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"]
    place = {name: shards[name.endswith("_scale_inv")] for name in tensors}
    for shard in shards:
        write_raw(folder / shard, {n: t for n, t in tensors.items() if place[n] == shard})
    (folder / INDEX).write_text("{}")
    edit_json(folder / INDEX, weight_map=place)
    assert_same(load(folder).params, load(model_dir("fp8")).params)


def test_scales_in_bfloat16(tmp_path: Path):
    """Each value is one of float32: the same parameters, dequantised, kept, and as an update."""

    def rounded(tensor: Raw) -> np.ndarray:
        return np.frombuffer(tensor.data, "<f4").astype(ml_dtypes.bfloat16)

    def narrow(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            tensors[name] = Raw("BF16", tensors[name].shape, rounded(tensors[name]).tobytes())

    def wide(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            values = rounded(tensors[name]).astype("<f4")
            tensors[name] = Raw("F32", tensors[name].shape, values.tobytes())

    short = edit_tensors(model_dir("fp8"), tmp_path / "bf16", narrow)
    long = edit_tensors(model_dir("fp8"), tmp_path / "f32", wide)
    assert_same(load(short).params, load(long).params)
    kept = load(long, narrow="keep")
    read = jax.tree.map(without_bits, load(short, narrow="keep").params, is_leaf=is_narrow)
    assert_same(read, jax.tree.map(without_bits, kept.params, is_leaf=is_narrow))
    assert_same(read_update(kept.config, shapes(kept.params), short, dtype="float32"), read)
