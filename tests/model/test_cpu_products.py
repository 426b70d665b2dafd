"""Products on a CPU with weights as they lie in memory, against float64 over the same weights."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model import moe
from mtp_jax.model.attention import cpu_heads
from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.experts import cpu as cpu_experts
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Bf16, Fp8, InStack, Narrow, expand, with_bits, without_bits

SHAPES = [(256, 384), (192, 96), (2, 40, 48), (576, 1792)]


def bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Bf16:
    return with_bits(Bf16(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)))


def fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> Narrow:
    """Every value of e4m3 but NaN, and a scale per block of each matrix."""
    codes = np.arange(256, dtype=np.uint8)
    codes = np.resize(codes[(codes & 0x7F) != 0x7F], shape)
    blocks = [-(-n // 128) for n in shape[-2:]]
    scale = jnp.asarray(rng.uniform(0.5, 2, (*shape[:-2], *blocks)), jnp.float32)
    return with_bits(Fp8(jnp.asarray(codes.view(jnp.float8_e4m3fn)), scale))


each_kind = pytest.mark.parametrize("kind", [bf16, fp8])


def near(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def wide(w: Narrow) -> np.ndarray:
    """The weight in float64, expanded without its bits."""
    return np.asarray(expand(without_bits(w), jnp.float32), np.float64)


@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("matrices", [True, False], ids=["AMX", "no AMX"])
def test_products_of_any_number_of_rows(rng, kind, shape, matrices):
    """One row, few, more than loops take, more than have their parts multiplied together, and many."""
    w = kind(rng, shape)
    for rows in (1, 3, 9, 40, 80):
        x = rng.normal(size=(1, rows, shape[-1])).astype(np.float32)
        got = jax.jit(xla_cpu(matrices=matrices).products.linear)(x, w)
        near(got, np.tensordot(x.astype(np.float64), wide(w), (2, -1)))


@pytest.mark.parametrize("shape", [(3, 24, 40), (4, 128, 768)], ids=str)
def test_products_by_head(rng, shape):
    """Of a layer's own weight and of one in a stack; heads that a cache holds together, and more."""
    stack = bf16(rng, (2, *shape))
    for w in (Bf16(stack.values[1], stack.bits[1]), InStack(stack, jnp.int32(1))):
        for rows in (1, 8, 9):
            x, y = (rng.normal(size=(shape[0], rows, n)).astype(np.float32) for n in shape[1:])
            want = wide(Bf16(stack.values[1]))
            near(jax.jit(cpu_heads.inward)(x, w), np.einsum("nto,noi->nti", x.astype(np.float64), want))
            near(jax.jit(cpu_heads.outward)(y, w), np.einsum("nti,noi->nto", y.astype(np.float64), want))


@each_kind
def test_expansion_does_not_depend_on_the_bits(rng, kind):
    w = kind(rng, (256, 384))
    np.testing.assert_array_equal(expand(w, jnp.float32), expand(without_bits(w), jnp.float32))


@each_kind
def test_bits_lie_in_the_memory_of_the_values(rng, kind):
    w = kind(rng, (128, 256))
    assert w.bits.unsafe_buffer_pointer() == w.values.unsafe_buffer_pointer()


def test_a_program_widens_no_weight_of_few_rows_in_memory(rng):
    """The largest array that a compiled product of one row makes is smaller than the weight in float32."""
    w = bf16(rng, (1024, 1024))
    compiled = jax.jit(xla_cpu().products.linear).lower(np.zeros((1, 1, 1024), np.float32), w).compile()
    assert (memory := compiled.memory_analysis()) is not None
    assert memory.temp_size_in_bytes < 1024 * 1024


@each_kind
def test_a_program_widens_no_stack_of_experts_in_memory(rng, kind):
    """Of many rows, which visit an expert after the other: it looks up their bits."""
    gate_up, down, rows = kind(rng, (32, 2, 256, 512)), kind(rng, (32, 512, 256)), 320
    r = Routing(jnp.zeros((rows, 2), jnp.int32), jnp.ones((rows, 2)))
    assert not cpu_experts.takes(gate_up, down, r.ids.size)
    routed = jax.jit(xla_cpu(matrices=True).experts.routed)
    compiled = routed.lower(gate_up, down, np.zeros((rows, 512), np.float32), r).compile()
    assert (memory := compiled.memory_analysis()) is not None
    assert memory.temp_size_in_bytes < np.prod(gate_up.shape)


@each_kind
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_routed_experts(rng, kind, rows):
    """All pairs at once for few rows, an expert after the other for many."""
    gate_up, down = kind(rng, (6, 2, 128, 256)), kind(rng, (6, 256, 128))
    gate_up, down = (replace(w, scale=w.scale / 16) if isinstance(w, Fp8) else w for w in (gate_up, down))
    x = rng.normal(size=(rows, 256)).astype(np.float32) / 16
    ids = jnp.asarray(np.stack([rng.permutation(6)[:2] for _ in range(rows)]), jnp.int32)
    r = Routing(ids, jnp.asarray(rng.random((rows, 2)), jnp.float32))
    want = moe.dense(without_bits(gate_up), without_bits(down), jnp.asarray(x), r, xla().products.product)
    assert cpu_experts.takes(gate_up, down, r.ids.size) == (rows < 70)
    got = jax.jit(xla_cpu().experts.routed)(gate_up, down, x, r)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
