"""Products on a CPU with weights as they lie in memory, against float64 over the same weights."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model.attention import cpu_heads
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.experts import cpu as cpu_experts
from mtp_jax.model.experts.plain import OwnExperts
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Bf16, Fp8, InStack, Narrow, expand, with_bits, without_bits
from tests.rounding import near

SHAPES = [(256, 384), (192, 96), (2, 40, 48), (576, 1792)]


def bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Bf16:
    return with_bits(Bf16(jnp.asarray(rng.normal(size=shape).astype(jnp.bfloat16))))


def fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> Narrow:
    """Every value of e4m3 but NaN, and a scale per block of each matrix."""
    codes = np.arange(256, dtype=np.uint8)
    codes = np.resize(codes[(codes & 0x7F) != 0x7F], shape)
    blocks = [-(-n // 128) for n in shape[-2:]]
    scale = jnp.asarray(rng.uniform(0.5, 2, (*shape[:-2], *blocks)), jnp.float32)
    return with_bits(Fp8(jnp.asarray(codes.view(jnp.float8_e4m3fn)), scale))


each_kind = pytest.mark.parametrize("kind", [bf16, fp8])


def wide(w: Any) -> np.ndarray:
    """The weight in float64."""
    values = np.asarray(w.values).astype(np.float64)
    if isinstance(w, Fp8):
        scale = np.asarray(w.scale).repeat(128, axis=-2).repeat(128, axis=-1)
        values *= scale[..., : values.shape[-2], : values.shape[-1]]
    return values


def case(*of: Any, fast: bool) -> Any:
    """A case whose id names its kind, shape or rows, and whether there are matrix instructions."""
    names = [getattr(x, "__name__", str(x)) for x in of[:-1]]
    marks = () if fast else pytest.mark.rest
    return pytest.param(*of, id="-".join([*names, "AMX" if of[-1] else "no AMX"]), marks=marks)


# The matrix instructions are for bfloat16: they multiply nothing of FP8.
PRODUCTS = [
    case(kind, shape, matrices, fast=shape == SHAPES[3] or (shape == SHAPES[2] and not matrices))
    for shape in SHAPES
    for kind, matrices in ((bf16, True), (bf16, False), (fp8, False))
]


@pytest.mark.parametrize(("kind", "shape", "matrices"), [*PRODUCTS, case(fp8, SHAPES[2], True, fast=False)])
def test_products_of_any_number_of_rows(rng, kind, shape, matrices):
    """One row, few, more than loops take, more than have their parts multiplied together, and many."""
    w = kind(rng, shape)
    given = [rng.normal(size=(1, rows, shape[-1])).astype(np.float32) for rows in (1, 3, 9, 40, 80)]
    linear = xla_cpu(matrices=matrices).products.linear
    found = jax.jit(lambda given, w: [linear(rows, w) for rows in given])(given, w)
    for x, got in zip(given, found, strict=True):
        near(got, np.tensordot(x, wide(w), (2, -1)), shape[-1])


@pytest.mark.parametrize("shape", [(3, 24, 40), pytest.param((4, 128, 768), marks=pytest.mark.rest)], ids=str)
@each_kind
def test_products_by_head(rng, kind, shape):
    """Of a layer's own weight and of one in a stack; heads that a cache holds together, and more."""
    stack = kind(rng, (2, *shape))
    weights = jax.tree.map(lambda a: a[1], stack), InStack(stack, jnp.int32(1))
    given = [
        tuple(rng.normal(size=(shape[0], rows, n)).astype(np.float32) for n in shape[1:])
        for rows in (1, 8, 9)
    ]

    @jax.jit
    def products(given, weights):
        return [[(cpu_heads.inward(x, w), cpu_heads.outward(y, w)) for x, y in given] for w in weights]

    want = wide(stack)[1]
    for found in products(given, weights):
        for (x, y), (inward, outward) in zip(given, found, strict=True):
            near(inward, np.einsum("nto,noi->nti", x, want), shape[1])
            near(outward, np.einsum("nti,noi->nto", y, want), shape[2])


@each_kind
def test_expansion_does_not_depend_on_the_bits(rng, kind):
    w = kind(rng, (256, 384))
    got, plainly = jax.jit(lambda *both: [expand(w, jnp.float32) for w in both])(w, without_bits(w))
    np.testing.assert_array_equal(got, plainly)
    np.testing.assert_array_equal(got, wide(w).astype(np.float32))


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


@pytest.mark.rest
@each_kind
def test_a_program_widens_no_stack_of_experts_in_memory(rng, kind):
    """Of many rows, which visit an expert after the other: it looks up their bits."""
    gate_up, down, rows = kind(rng, (32, 2, 128, 512)), kind(rng, (32, 512, 128)), 320
    r = Routing(jnp.zeros((rows, 2), jnp.int32), jnp.ones((rows, 2)))
    assert not cpu_experts.takes(gate_up, down, r.ids.size)
    routed = jax.jit(xla_cpu(matrices=True).experts.routed)
    own = OwnExperts(gate_up, down)
    compiled = routed.lower(own, np.zeros((rows, 512), np.float32), r).compile()
    assert (memory := compiled.memory_analysis()) is not None
    assert memory.temp_size_in_bytes < np.prod(gate_up.shape)


EXPERTS = [
    *(case(rows, kind, False, fast=(rows == 4) == (kind is fp8)) for rows in (1, 4) for kind in (bf16, fp8)),
    case(70, bf16, True, fast=True),
    *(case(70, kind, False, fast=False) for kind in (bf16, fp8)),
]


@pytest.mark.parametrize(("rows", "kind", "matrices"), EXPERTS)
def test_routed_experts(rng, rows, kind, matrices):
    """All pairs at once for few rows, an expert after the other for many."""
    gate_up, down = kind(rng, (6, 2, 128, 256)), kind(rng, (6, 256, 128))
    gate_up, down = (replace(w, scale=w.scale / 16) if isinstance(w, Fp8) else w for w in (gate_up, down))
    x = rng.normal(size=(rows, 256)).astype(np.float32) / 16
    ids = np.stack([rng.permutation(6)[:2] for _ in range(rows)]).astype(np.int32)
    r = Routing(jnp.asarray(ids), jnp.asarray(rng.random((rows, 2)), jnp.float32))
    gate, up = np.einsum("eghi,ti->gteh", wide(gate_up), x)
    each = np.einsum("eoh,teh->teo", wide(down), gate / (1 + np.exp(-gate)) * up)
    want = np.einsum("tk,tko->to", r.weights, each[np.arange(rows)[:, None], ids])
    assert cpu_experts.takes(gate_up, down, r.ids.size) == (rows < 70)
    got = jax.jit(xla_cpu(matrices=matrices).experts.routed)(OwnExperts(gate_up, down), x, r)
    near(got, want, 256 + 128 + 2)
