"""Products as loop fusions of XLA on a CPU, which read weights where they lie and widen them in registers.

XLA would widen weights for a matrix product, or copy them out of a stack of experts, in memory first. Here
slices of the input features are multiplied lane by lane and added up; a product with ones sums the lanes.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.model.hf_quantization import FP8_BLOCK
from mtp_jax.model.narrow import (
    E4M3_UNIT,
    Bf16,
    Fp8,
    InStack,
    Narrow,
    bf16_of_bits,
    e4m3_of_bits,
    readable,
)

# A slice has the float32 of a vector register, or more where that would give too many slices.
_LANES, SLICES = 16, 64
# Number of sums that grow side by side: an addition takes about four cycles, and the next one waits for it.
_SUMS = 4
# Bytes of a core's second cache on the smallest server processors with AVX-512 (Skylake-SP, Zen 4).
CACHE_BYTES = 1 << 20
# Rows of a weight that stay in the first cache while each row of x is multiplied with them.
_TILE = 64

Weight = Float[Array, "*o i"] | Narrow
Pick = Callable[[jax.Array], jax.Array]


def takes(w: Any) -> bool:
    """Whether these loops can read a weight."""
    return not isinstance(w, Narrow) or readable(w)


def product(x: Float[Array, "T i"], w: Narrow) -> Float[Array, "T O"]:
    """``x @ w.T`` in float32, w seen as a matrix [O, i]: for few rows.

    Each row reads the weights again, after the first one from a cache.
    """
    rows, outputs = len(x), math.prod(w.shape[:-1])
    tile = math.gcd(outputs, _TILE)

    def pick(a: jax.Array) -> jax.Array:
        return a.reshape(-1, 1, tile, a.shape[-1])

    y = sum_lanes(multiply(w, pick, x.astype(jnp.float32)[None, :, None]))
    return y.swapaxes(0, 1).reshape(rows, outputs)


def multiply(w: Weight, pick: Pick, x: Float[Array, "*b i"], slices: int = SLICES) -> Float[Array, "*c l"]:
    """Products of inputs, added up but for the last few lanes, which ``sum_lanes`` sums.

    pick: from an array [*o, n] with a weight's leading dimensions, the multiplied part, in a shape that
    fits x. slices: the most slices, about.
    """
    numbers, widen, scale_of = _read(w)
    inputs = w.shape[-1]
    parts = _slices(inputs, math.gcd(inputs, FP8_BLOCK) if scale_of else inputs, slices)

    def added(parts: list[slice]) -> jax.Array:
        terms = (widen(pick(numbers(part))) * x[..., part] for part in parts)
        return reduce(jnp.add, terms)

    if scale_of is None:
        return reduce(jnp.add, [added(own) for i in range(_SUMS) if (own := parts[i::_SUMS])])
    blocks = range(-(-inputs // FP8_BLOCK))
    groups = ([p for p in parts if p.start // FP8_BLOCK == b] for b in blocks)
    return reduce(jnp.add, [added(own) * pick(scale_of(b)) for b, own in zip(blocks, groups, strict=True)])


def sum_lanes(x: Float[Array, "*b l"]) -> Float[Array, "*b"]:
    """The sum over lanes, by a product. Without the barrier XLA would make it a part of the loops."""
    return jax.lax.optimization_barrier(x) @ jnp.ones(x.shape[-1], x.dtype)


def _read(w: Weight) -> tuple[Callable[[slice], jax.Array], Pick, Callable[[int], jax.Array] | None]:
    """A weight's numbers for a slice of inputs, the function to float32, and the scales [*o, 1] of a block.

    Only FP8 has scales. The slice of a weight in a stack is taken first and the weight then: XLA
    would copy the weight otherwise.
    """
    own, at = (w.stack, (w.at,)) if isinstance(w, InStack) else (w, ())

    def pick(a: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(a, at[0], keepdims=False) if at else a

    if isinstance(own, Bf16):
        return lambda part: pick(own.bits[..., part]), bf16_of_bits, None
    if isinstance(own, Fp8):
        return (
            lambda part: pick(own.bits[..., part]),
            e4m3_of_bits,
            lambda block: _spread(pick(own.scale[..., block]), w.shape),
        )
    assert not isinstance(own, Narrow), f"no loop reads {type(own).__name__}"
    return lambda part: own[..., part], lambda values: values.astype(jnp.float32), None


def _spread(scale: Float[Array, "*b"], shape: tuple[int, ...]) -> Float[Array, "*o one"]:
    """The scale of each output, from the scales of blocks, for results of ``e4m3_of_bits``."""
    stacked = math.prod(scale.shape[:-1])
    outputs = math.prod(shape[:-1]) // stacked
    spread = jnp.repeat(scale * E4M3_UNIT, FP8_BLOCK, axis=-1)[..., :outputs]
    return spread.reshape(*shape[:-1], 1)


def _slices(inputs: int, unit: int, most: int) -> list[slice]:
    """Slices of the inputs of equal size, of which a whole number is a ``unit``; about ``most`` at most."""
    step = math.gcd(unit, _LANES)
    least = min(-(-inputs // (step * max(most, 1))) * step, unit)
    lanes = next(n for n in range(least, unit + 1, step) if unit % n == 0)
    return [slice(at, at + lanes) for at in range(0, inputs, lanes)]
