"""DeepSeek-V4's e2m1 experts and e4m3 projections: exact values, their bytes in memory, damaged files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.checkpoint.fp4 import dequantise
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model.narrow import Fp4, Fp8, Narrow, expand, is_narrow
from mtp_jax.model.params import param_specs
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.files import Raw, Tensors, edit_json, edit_tensors, read_folder
from tests.models import apart
from tests.v4 import E2M1, QUANTISATION, Arrays, e2m1, scale_name, v4_config, v4_tensors, write_v4

CONFIG = v4_config(num_hidden_layers=2, compress_ratios=[4, 128, 0])
UP, Q = "layers.1.ffn.experts.3.w3.weight", "layers.0.attn.wq_a.weight"  # [32, 64], [24, 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4") / "fp4"


@pytest.fixture(scope="module")
def held(folder: Path) -> Arrays:
    return write_v4(folder, CONFIG, v4_tensors(CONFIG), fp4=True)


def values(loaded: Loaded, dtype: Any = jnp.float32) -> Arrays:
    """The loaded values, widened, in the shapes of their tensors."""
    specs = jax.tree.leaves(param_specs(loaded.config))
    arrays = jax.tree.leaves(loaded.params, is_leaf=is_narrow)

    @jax.jit
    def widened(arrays: list[Any]) -> list[jax.Array]:
        own = (
            w.reshape(*spec.tensor_shape) if isinstance(w, Fp8) and not isinstance(spec.names, tuple) else w
            for spec, w in zip(specs, arrays, strict=True)
        )
        return [expand(w, dtype) for w in own]

    found: Arrays = {}
    for spec, wide in zip(specs, jax.device_get(widened(arrays)), strict=True):
        for at, name in np.ndenumerate(spec_names(spec)):
            found[str(name)] = wide[at].reshape(spec.tensor_shape)
    return found


def weights(loaded: Loaded, kind: type[Narrow]) -> list[Any]:
    return [w for w in jax.tree.leaves(loaded.params, is_leaf=is_narrow) if isinstance(w, kind)]


@pytest.mark.parametrize("narrow", apart(["keep", "dequantise", None], "keep"))
def test_values_are_those_of_the_files(folder: Path, held: Arrays, narrow: Any):
    loaded = load(folder, narrow=narrow)
    got = values(loaded)
    assert got.keys() == held.keys()
    for name, w in got.items():
        np.testing.assert_array_equal(w, held[name], name)
    assert loaded.config.fp4
    assert len(weights(loaded, Fp4)) == (0 if narrow == "dequantise" else 6)
    assert bool(weights(loaded, Fp8)) == (narrow == "keep")
    assert loaded.bytes_read == sum(len(t.data) for t in read_folder(folder).values())


def test_values_in_bfloat16_are_exact(folder: Path, held: Arrays):
    """Three bits of mantissa and a power of two are."""
    loaded = load(folder, dtype="bfloat16", narrow="keep")
    for name, w in values(loaded, jnp.bfloat16).items():
        np.testing.assert_array_equal(w.astype(np.float32), held[name], name)


def test_experts_take_their_bytes_of_the_file(folder: Path, held: Arrays):
    files = read_folder(folder)
    own = [n for name in held if ".ffn.experts." in name for n in (name, scale_name(name))]
    kept = weights(load(folder, narrow="keep"), Fp4)
    assert sum(a.nbytes for a in jax.tree.leaves(kept)) == sum(len(files[n].data) for n in own)
    assert {a.dtype for a in jax.tree.leaves(kept)} == {np.dtype(np.uint8)}


def test_experts_over_eight_devices(folder: Path, held: Arrays):
    split = load(folder, mesh=make_mesh(2, 4))
    for name, w in values(split).items():
        np.testing.assert_array_equal(w, held[name], name)
    gate_up = split.params.layers[0].mlp.gate_up
    assert isinstance(gate_up, Fp4)
    assert gate_up.codes.addressable_shards[0].data.shape == (1, 2, 32, 32)


@pytest.mark.usefixtures("held")
@pytest.mark.rest
def test_projections_over_two_devices(folder: Path, tmp_path: Path):
    """Blocks of the weights divide over both; an error names the first weight whose blocks do not."""
    config = CONFIG | {"o_groups": 2, "o_lora_rank": 128, "moe_intermediate_size": 256}
    want, mesh = write_v4(tmp_path, config, v4_tensors(config), fp4=True), make_mesh(1, 2)
    split = load(tmp_path, narrow="keep", mesh=mesh)
    for name, w in values(split).items():
        np.testing.assert_array_equal(w, want[name], name)
    o = split.params.layers[0].attention.o_a
    assert isinstance(o, Fp8)
    assert [a.addressable_shards[0].data.shape for a in (o.values, o.scale)] == [(1, 128, 128), (1, 1)]
    with pytest.raises(ConfigError, match=r"wo_a\.weight: 32 of heads do not divide over 2 devices in fp8"):
        load(folder, narrow="keep", mesh=mesh)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_under_every_scale(dtype: Any):
    """Scales by which the least value, a half, is a normal float32, up to the largest."""
    exponents = np.arange(2, 241, dtype=np.uint8)
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (len(exponents), 1, 1))
    w = Fp4(jnp.asarray(codes), jnp.asarray(np.tile(exponents[:, None, None], (1, 16, 1))))
    assert w.shape == (len(exponents), 16, 32)
    got = np.asarray(jax.jit(lambda w: w.expand(dtype))(w), np.float64)
    pairs = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)
    want = pairs.reshape(16, 32) * np.exp2(np.arange(2, 241) - 127.0)[:, None, None]
    np.testing.assert_array_equal(got, want)
    assert np.array_equal(np.signbit(got), np.signbit(want))


def test_rows_grouped_differently(rng: np.random.Generator):
    codes, exponents = rng.integers(0, 256, (3, 8, 32)), rng.integers(100, 140, (3, 8, 2))
    w = Fp4(jnp.asarray(codes.astype(np.uint8)), jnp.asarray(exponents.astype(np.uint8)))

    @jax.jit
    def both(w: Fp4) -> tuple[jax.Array, jax.Array]:
        return w.reshape(3, 2, 4, 64).expand(jnp.float32), w.expand(jnp.float32).reshape(3, 2, 4, 64)

    np.testing.assert_array_equal(*both(w))


@settings(max_examples=50)
@given(st.integers(0, 127), st.integers(1, 128), st.sampled_from([np.float32, ml_dtypes.bfloat16]))
def test_any_columns(first: int, count: int, dtype: Any):
    w = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    raw, scale, want = e2m1(w)
    codes = np.frombuffer(raw.data, np.int8).reshape(raw.shape)
    exponents = np.frombuffer(scale.data, ml_dtypes.float8_e8m0fnu).reshape(scale.shape)
    columns = range(first, min(first + count, 128))
    out = np.empty((5, len(columns)), dtype)
    dequantise(codes, exponents, columns, out)
    np.testing.assert_array_equal(out.astype(np.float32), want[:, columns.start : columns.stop])


@pytest.mark.rest
def test_tensors_decide_the_format_of_experts(tmp_path: Path, folder: Path, held: Arrays):
    """Community checkpoints have FP8 experts; config.json may say so, or not."""
    want = write_v4(tmp_path / "fp8", CONFIG, v4_tensors(CONFIG), fp8=True)
    for told in ("fp8", "fp4", None):
        edit_json(tmp_path / "fp8" / "config.json", expert_dtype=told)
        loaded = load(tmp_path / "fp8", narrow="keep")
        assert (loaded.config.fp8, loaded.config.fp4) == (True, False)
        assert not weights(loaded, Fp4)
    for name, w in values(loaded).items():
        np.testing.assert_array_equal(w, want[name], name)
    unsaid = edit_tensors(folder, tmp_path / "unsaid", lambda t: None)
    nested = {"quantization_config": QUANTISATION | {"expert_dtype": "fp4"}}
    for told in ({"expert_dtype": None}, nested):
        edit_json(unsaid / "config.json", **told)
        loaded = load(unsaid)
        assert loaded.config.fp4
        np.testing.assert_array_equal(values(loaded)[UP], held[UP])


def test_scales_of_e4m3_in_float32(tmp_path: Path, folder: Path, held: Arrays):
    def widen(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(".scale") and ".ffn.experts." not in n]:
            codes = np.frombuffer(tensors[name].data, np.uint8)
            wide = np.exp2(codes.astype(np.float32) - 127)
            tensors[name] = Raw("F32", tensors[name].shape, wide.astype("<f4").tobytes())

    got = values(load(edit_tensors(folder, tmp_path / "model", widen), narrow="keep"))
    np.testing.assert_array_equal(got[Q], held[Q])


def put(name: str, dtype: str, shape: list[int], byte: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        size = {"F32": 4, "F8_E8M0": 1, "I8": 1, "U8": 1}[dtype] * int(np.prod(shape))
        tensors[name] = Raw(dtype, shape, bytes([byte]) * size)

    return change


UPS, QS = scale_name(UP), scale_name(Q)
WRONG: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "no scale": (lambda t: t.pop(UPS), (f"missing (1): {UPS}",)),
    "no scale of e4m3": (lambda t: t.pop(QS), (f"missing (1): {QS}",)),
    "a scale of nothing": (
        put("layers.0.attn.kv_norm.scale", "F8_E8M0", [1], 127),
        ("unexpected (1): model.safetensors: layers.0.attn.kv_norm.scale",),
    ),
    "fewer scales": (
        put(UPS, "F8_E8M0", [32, 1], 127),
        (f"{UPS} is F8_E8M0 [32, 1]; expected F8_E8M0 [32, 2]: one scale per 32 inputs of [32, 64]",),
    ),
    "scales in float32": (put(UPS, "F32", [32, 2], 0), (f"{UPS} is F32 [32, 2]; expected F8_E8M0 [32, 2]",)),
    "a value per byte": (
        put(UP, "I8", [32, 64], 0),
        (f"{UP} is I8 [32, 64]; expected I8 [32, 32]: two values a byte of [32, 64]",),
    ),
    "as NVFP4 has it": (
        put(UP, "U8", [32, 32], 0),
        (f"{UP} has dtype U8, but config.json beside it has no quantization_config of nvfp4", f"{UPS}"),
    ),
    "not a number": (put(UPS, "F8_E8M0", [32, 2], 255), (f"{UPS} has NaN, or scales above 2^113",)),
    "too large": (put(UPS, "F8_E8M0", [32, 2], 241), (f"{UPS} has NaN, or scales above 2^113",)),
    "not a number, e4m3": (put(QS, "F8_E8M0", [1, 1], 255), (f"{QS} has NaN or infinite scales",)),
    "norm in e4m3": (
        lambda t: t.update({"norm.weight": Raw("F8_E4M3", [64], bytes(64))}),
        ("tensor norm.weight has dtype F8_E4M3; expected one of F32, BF16, F16",),
    ),
}


@pytest.mark.parametrize("narrow", apart(["keep", "dequantise"], "keep"))
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("held")
def test_tensors_that_do_not_fit(folder: Path, tmp_path: Path, case: str, narrow: Any):
    change, fragments = WRONG[case]
    damaged = edit_tensors(folder, tmp_path / "model", change)
    with pytest.raises(CheckpointError) as error:
        load(damaged, narrow=narrow)
    for fragment in fragments:
        assert fragment in str(error.value)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.usefixtures("held")
def test_configs_that_do_not_fit(folder: Path, tmp_path: Path):
    copy = edit_tensors(folder, tmp_path / "model", lambda t: None)
    edit_json(copy / "config.json", quantization_config=None, expert_dtype=None)
    with pytest.raises(CheckpointError, match=r"dtype I8, but config.json beside it has no quant.* of fp4"):
        load(copy)
    for told, message in (
        ({"expert_dtype": "nvfp4"}, "expert_dtype = 'nvfp4' is not supported; expected fp4 or fp8"),
        (
            {
                "expert_dtype": None,
                "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            },
            "DeepSeek-V4 with weights in NVFP4 is not supported",
        ),
    ):
        edit_json(copy / "config.json", **told)
        with pytest.raises(ConfigError, match=message):
            load(copy)


def test_inputs_that_groups_do_not_divide(tmp_path: Path):
    config = CONFIG | {"moe_intermediate_size": 48}
    tensors = v4_tensors(config)
    write_v4(tmp_path / "f32", config, tensors)

    def pack(files: Tensors) -> None:
        name = "layers.0.ffn.experts.0.w2.weight"
        files[name], files[scale_name(name)], _ = e2m1(np.pad(tensors[name], ((0, 0), (0, 16))))

    folder = edit_tensors(tmp_path / "f32", tmp_path / "model", pack)
    edit_json(folder / "config.json", expert_dtype="fp4")
    with pytest.raises(CheckpointError, match="48 inputs are no multiple of 32, which share a scale"):
        load(folder)
