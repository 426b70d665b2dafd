"""Products with FP4 weights: oracles, the choice of the kernel, and faults that the interpreter finds."""

from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import FORMS, KERNELS
from kernels_pallas.check.registry import cases
from kernels_pallas.grouped_matmul import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.fp4 import CODES, SCALES, VALUES, bits
from kernels_pallas.grouped_matmul.tile import ProductSizes, Tile
from kernels_pallas.measured import Run, kernels
from kernels_pallas.weighed import Weighed
from mtp_jax.errors import ConfigError
from mtp_jax.model.experts.hopper import HopperExperts
from mtp_jax.model.experts.plain import Experts, OwnExperts
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Fp4
from mtp_jax.model.products.hopper import HopperProducts
from mtp_jax.model.products.plain import Products
from tests.kernels.interpreter import distance, interpret, needs_interpreter, notices, rounded, without

CASES = {c.name.partition("/")[2]: c for c in cases("grouped_matmul/small-fp4")}
# The values of the eight codes without a sign (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FORM = FORMS[0]
WIDTH, EXPERTS, LIMIT = 512, 3, 0.25


def values(codes: np.ndarray) -> np.ndarray:
    """e2m1 values in float64, the low four bits of a byte first."""
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return np.where(nibbles > 7, -1.0, 1.0) * E2M1[nibbles & 7]


def expanded(w: Any) -> np.ndarray:
    scale = 2.0 ** (np.asarray(w.exponents, np.float64) - 127)
    return values(np.asarray(w.codes)) * np.repeat(scale, 32, -1)


def random_fp4(rng, *shape: int) -> Fp4:
    *rows, inputs = shape
    codes = rng.integers(0, 256, (*rows, inputs // 2)).astype(np.uint8)
    return Fp4(codes, rng.integers(118, 123, (*rows, inputs // 32)).astype(np.uint8))


def given(rng, tokens: int) -> tuple[Any, OwnExperts, Any]:
    """Rows, experts and routing; an id that is no expert's among them."""
    x = rng.normal(size=(tokens, WIDTH)).astype(jnp.bfloat16)
    own = OwnExperts(random_fp4(rng, EXPERTS, 2, WIDTH, WIDTH), random_fp4(rng, EXPERTS, WIDTH, WIDTH))
    ids = np.stack([rng.permutation(EXPERTS + 1)[:2] for _ in range(tokens)]).astype(np.int32)
    return x, own, Routing(jnp.asarray(ids), rng.random((tokens, 2)).astype(np.float32))


def by_float64(x: Any, own: OwnExperts, r: Any) -> np.ndarray:
    big, small, out = expanded(own.gate_up), expanded(own.down), np.zeros(x.shape)
    for t, k in np.ndindex(r.ids.shape):
        if (e := int(r.ids[t, k])) < EXPERTS:
            gate, up = big[e] @ x[t].astype(np.float64)
            gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
            out[t] += float(r.weights[t, k]) * (small[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def test_bits_of_a_word_are_its_values():
    """All words of equal bytes, and words of different bytes."""
    byte = np.arange(256, dtype=np.uint8)
    codes = np.stack([np.repeat(byte[:, None], 4, 1), (byte[:, None] + np.array([0, 77, 130, 201])) % 256])
    codes = codes.astype(np.uint8)
    pairs = np.stack(bits(codes.view(np.int32)[..., 0]), -1)
    got = pairs.view(jnp.bfloat16).astype(np.float64) * 2.0**126
    np.testing.assert_array_equal(got, values(codes))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(values(codes)))


def test_every_value_and_scale_expands(rng):
    """Scales from the least normal one to the largest that a checkpoint may have; bfloat16 holds them."""
    exponents = np.arange(2, 241, dtype=np.uint8)[:, None]
    codes = rng.permutation(256).astype(np.uint8).reshape(16, 16)[np.arange(239) % 16]
    got = np.asarray(jax.jit(reference.expand_fp4)(codes, exponents), np.float64)
    np.testing.assert_array_equal(got, expanded(Fp4(codes, exponents)))
    np.testing.assert_array_equal(got.astype(jnp.bfloat16).astype(np.float64), got)


def held(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """Places in an array that each lane holds: [4 warps, 32 lanes, registers, numbers of a register]."""
    of, x = layout.to_mgpu(), np.arange(np.prod(shape)).reshape(shape)
    for tile in of.tiling.tiles:
        kept, cut = x.shape[: x.ndim - len(tile)], x.shape[x.ndim - len(tile) :]
        x = x.reshape(*kept, *(n for size, t in zip(cut, tile, strict=True) for n in (size // t, t)))
        of_tiles = range(len(kept), x.ndim)
        x = x.transpose(*range(len(kept)), *of_tiles[::2], *of_tiles[1::2])
    first = [d + x.ndim for d in (*of.warp_dims, *of.lane_dims) if isinstance(d, int)]
    last = of.vector_dim + x.ndim
    x = x.transpose(*first, *(d for d in range(x.ndim) if d not in (*first, last)), last)
    for axis, d in enumerate(of.lane_dims, start=1):
        if not isinstance(d, int):  # lanes that hold the same
            x = np.repeat(np.expand_dims(x, axis), d.times, axis)
    return x.reshape(4, 32, -1, x.shape[-1])


def test_a_lane_has_the_values_of_its_codes_and_their_scale():
    """The interpreter knows no registers."""
    codes, scales, got = held(CODES, (64, 32)), held(SCALES, (64, 2)), held(VALUES, (64, 64))
    np.testing.assert_array_equal(np.unique(got), np.arange(64 * 64))
    first = 2 * codes[..., :1]  # a row of codes is half as long as a row of values
    np.testing.assert_array_equal(np.diff(codes), 1)
    np.testing.assert_array_equal(got, first + np.arange(8))
    np.testing.assert_array_equal(scales, first // 32)


@pytest.mark.parametrize("tokens", [5, 20])
def test_experts_equal_those_of_float64(tokens, rng, monkeypatch):
    """Experts as a kernel gets them, by its reference, and experts by XLA."""
    called = []

    def grouped(*args, tile, ending, interpret):
        called.append(tile)
        return (reference.grouped_matmul(*args, rows=tile.rows, ending=ending)[0].astype(jnp.bfloat16),)

    monkeypatch.setattr(mosaic_gpu, "grouped_matmul", grouped)
    x, own, r = given(rng, tokens)
    want = by_float64(x, own, r)
    on = HopperProducts(kernels=frozenset((FORM,)), strict=True)
    for experts in (HopperExperts(on), Experts(Products())):
        y = jax.jit(partial(experts.routed, limit=LIMIT))(own, x, r)
        y = y.summed() if isinstance(y, Weighed) else y
        # Results of both products are rounded to bfloat16, and rows between them, and weighted rows.
        assert distance(y, want) < rounded(6)
    assert [(tile.rows, tile.columns) for tile in called] == [(64, 128), (64, 256)]


def test_a_time_of_fp8_experts_does_not_choose_the_kernel_of_fp4(rng, monkeypatch):
    assert FORM not in kernels()
    run = Run("H200", date(2026, 11, 29), {"grouped_matmul/fp4-gated-6x1": 30})
    monkeypatch.setattr("kernels_pallas.measured.runs", lambda: (run,))
    assert kernels() == {FORM}
    x, own, r = given(rng, 2)
    monkeypatch.setattr(mosaic_gpu, "grouped_matmul", lambda *_, **__: pytest.fail("a kernel was chosen"))
    on = HopperExperts(HopperProducts(kernels=frozenset(KERNELS)))
    assert jax.eval_shape(on.routed, own, x, r).shape == x.shape


@pytest.mark.parametrize(
    ("x", "down", "match"),
    [
        ((1, 512, "float32"), (512, 512), "activations is float32"),
        ((1, 512, "bfloat16"), (512, 256), "input features over 512 is 256"),
        ((1, 512, "bfloat16"), (64, 512), "output features over 128 is 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(x, down, match, rng):
    *shape, dtype = x
    own = OwnExperts(random_fp4(rng, 1, 2, 512, 512), random_fp4(rng, 1, *down))
    on = HopperExperts(HopperProducts(strict=True))
    routing = Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    with pytest.raises(ConfigError, match=match):
        jax.eval_shape(on.routed, own, jnp.zeros(shape, dtype), routing)


def test_experts_half_in_fp4_are_refused(rng):
    own = OwnExperts(random_fp4(rng, 1, 2, 512, 512), jnp.zeros((1, 512, 512), jnp.bfloat16))
    routing = Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    with pytest.raises(ConfigError, match="FP4 together or not at all"):
        HopperExperts(HopperProducts(strict=True)).routed(own, jnp.zeros((1, 512), jnp.bfloat16), routing)


@pytest.mark.parametrize("tile", [Tile(128, 128), Tile(64, 64)])
def test_tiles_that_leave_no_room_are_refused(tile):
    with pytest.raises(ValueError, match="FP4; expected bfloat16, and 64 rows x 128 or 256"):
        ProductSizes(tile, jnp.bfloat16, False, 128, 128, 512, 1, fp4=True)


@needs_interpreter
@pytest.mark.slow
def test_scales_of_all_sizes_reach_their_rows_of_weights():
    """A row has one scale, up to the largest that a checkpoint may have; so a wrong one is seen in each."""
    case = CASES["small-fp4-down-shared"]

    def inputs(key: jax.Array) -> Any:
        x, codes, _, exponents, tiles = case.inputs(key)
        row = jnp.arange(exponents.shape[2])
        of_row = (8 + row * 29 % 233).astype(jnp.uint8)
        zeros = jnp.where(row % 16 == 3, 0x80, 0x0F)[:, None]  # 0 beside -0
        codes = jnp.where(row[:, None] % 16 > 2, codes, codes & zeros.astype(jnp.uint8))
        return x, codes, None, jnp.broadcast_to(of_row[:, None], exponents.shape), tiles

    def by_row(y: Any, inputs: Any) -> Any:
        scale = 2.0 ** (np.asarray(inputs[3][0, 0, :, 0], np.float64) - 127)
        return (np.asarray(y[0], np.float64) / scale).astype(np.float32)

    of = partial(replace, case, inputs=inputs)
    plain = of(
        kernel=lambda *given, interpret: by_row(case.kernel(*given, interpret=interpret), given),
        reference=lambda *given: by_row(case.reference(*given), given),
    )
    run = interpret(plain)
    assert not run.races
    assert run.distance < rounded(2)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_that_nobody_waits_for_are_noticed(monkeypatch, capfd):
    without(monkeypatch, "barrier_wait", "Fp4Product.sums.<locals>.over_k.<locals>.step")
    assert notices(CASES["small-fp4-down"])
    capfd.readouterr()  # every race is printed
