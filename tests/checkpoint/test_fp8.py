"""FP8 blocks: fixed 128x128, partial at the edges, any rectangle of them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.checkpoint import load
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.checkpoint.formats import may_be_narrow
from mtp_jax.checkpoint.fp8 import dequantise, scale_shape
from tests.checkpoint.files import assert_same, copy_folder, edit_json, read_folder, write_raw
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
    dequantise(weight, scale, range(shape[0]), range(shape[1]), out)
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
    dequantise(weight, scale, range(top, bottom), range(left, right), out)
    expected = weight.astype(np.float32) * scale.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    np.testing.assert_array_equal(out, expected[top:bottom, left:right])


def test_every_code():
    weight = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(1, 256)
    out = np.empty((1, 256), np.float32)
    dequantise(weight, np.ones((1, 2), np.float32), range(1), range(256), out)
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
