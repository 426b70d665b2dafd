"""Products as loop fusions of XLA on a CPU, which read weights where they lie and widen them in registers.

XLA would widen weights for a matrix product, or copy them out of a stack of experts, in memory first. Here
slices of the input features are multiplied lane by lane and added up; a second product sums the lanes.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.model.hf_quantization import FP8_BLOCK
from mtp_jax.model.narrow import (
    E4M3_UNIT,
    Bf16,
    Fp8,
    InStack,
    Matrix,
    Narrow,
    bf16_of_bits,
    e4m3_of_bits,
    readable,
)

# A slice is as wide as a vector register of float32, or wider where there would be too many slices.
_LANES, SLICES = 16, 64
# Number of sums that grow side by side, as an addition waits about four cycles for the addition before it.
_SUMS = 4
# Bytes of a core's second cache on the smallest server processors with AVX-512 (Skylake-SP, Zen 4).
CACHE_BYTES = 1 << 20
# Rows of a weight that stay in the first cache while each row of x is multiplied with them.
_TILE = 64

Pick = Callable[[jax.Array], jax.Array]


def takes(w: Any) -> bool:
    """Whether these loops can read a weight."""
    return not isinstance(w, Narrow) or readable(w)


def product(x: Float[Array, "T i"], w: Narrow) -> Float[Array, "T O"]:
    """``x @ w.T`` in float32, w seen as a matrix [O, i]: for few rows.

    Each row reads the weights again; rows after the first read them from a cache.
    """
    rows, outputs = len(x), math.prod(w.shape[:-1])
    tile = math.gcd(outputs, _TILE)
    tiles, x = outputs // tile, x.astype(jnp.float32)
    if rows == 1:
        # The weight has this dimension from the beginning, or every slice would add it anew.
        lead, spread, x = (-1, tiles, 1, tile), LeadPlaces((1, tiles, 1, tile), (0, 1, 2, 3), ()), x[0]
    else:
        lead, spread = (-1, tiles, tile), LeadPlaces((1, tiles, rows, tile), (0, 1, 3), (2,))
    return sum_lanes(_multiplied(w, lead, x, spread)).swapaxes(1, 2).reshape(rows, outputs)


def product_by_head(x: Float[Array, "N T i"], w: Narrow) -> Float[Array, "N T o"]:
    """``x[n] @ w[n].T`` in float32 for a matrix [N, o, i] of each head: for few rows."""
    heads, rows, outputs = *x.shape[:2], w.shape[1]
    if rows == 1:
        spread, x = LeadPlaces((1, heads, outputs), (0, 1, 2), (1,)), x[:, 0]
    else:
        spread = LeadPlaces((1, heads, rows, outputs), (0, 1, 3), (1, 2))
    return sum_lanes(_multiplied(w, (-1, heads, outputs), x, spread)).reshape(heads, rows, outputs)


def _multiplied(
    w: Narrow, lead: tuple[int, ...], x: Float[Array, "*b i"], spread: "LeadPlaces"
) -> Float[Array, "*c l"]:
    """``multiply`` of a weight of its own, or of the weight that is read in a stack."""
    own, at = (w.stack, w.at) if isinstance(w, InStack) else (w, None)

    def pick(a: jax.Array) -> jax.Array:
        if at is None:
            return a
        starts = (at, *(0 for _ in a.shape[1:]))
        return jax.lax.dynamic_slice(a, starts, (1, *a.shape[1:]), allow_negative_indices=False)

    return multiply(own, lead, pick, x, spread)


class LeadPlaces(NamedTuple):
    """Places of two factors' leading dimensions in their product.

    Attributes:
        shape: shape of the product without the lanes.
        w: axes of the product that the picked weights have.
        x: axes of the product that the inputs have.
    """

    shape: tuple[int, ...]
    w: tuple[int, ...]
    x: tuple[int, ...]


def multiply(
    w: Matrix,
    lead: tuple[int, ...],
    pick: Pick,
    x: Float[Array, "*b i"],
    spread: LeadPlaces,
    slices: int = SLICES,
) -> Float[Array, "*c l"]:
    """Products of inputs, added up but for the last few lanes, which ``sum_lanes`` sums.

    lead: shape to which all dimensions of w but the last are reshaped. pick: selects the weights to multiply
    from an array [*lead, n]. The slice is taken first and the weight then: otherwise XLA would copy it.
    slices: approximate maximum of slices.
    """
    numbers, widen, scale_of = _read(w, lead)
    inputs = w.shape[-1]
    parts = _slices(inputs, math.gcd(inputs, FP8_BLOCK) if scale_of else inputs, slices)

    def over(a: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        shape = (*spread.shape, a.shape[-1])
        return jax.lax.broadcast_in_dim(a, shape, (*axes, len(spread.shape)))

    def added(parts: list[slice]) -> jax.Array:
        terms = (over(widen(pick(numbers(p))), spread.w) * over(x[..., p], spread.x) for p in parts)
        return reduce(jnp.add, terms)

    if scale_of is None:
        return reduce(jnp.add, [added(own) for i in range(_SUMS) if (own := parts[i::_SUMS])])
    blocks = range(-(-inputs // FP8_BLOCK))
    groups = ([p for p in parts if p.start // FP8_BLOCK == b] for b in blocks)
    scales = (over(pick(scale_of(b)), spread.w) for b in blocks)
    return reduce(jnp.add, [added(own) * scale for own, scale in zip(groups, scales, strict=True)])


def sum_lanes(x: Float[Array, "*b l"]) -> Float[Array, "*b"]:
    """The sum over lanes, by a product. Without the barrier XLA would make it a part of the loops."""
    return jax.lax.optimization_barrier(x) @ jnp.ones(x.shape[-1], x.dtype)


def _read(
    w: Matrix, lead: tuple[int, ...]
) -> tuple[Callable[[slice], jax.Array], Pick, Callable[[int], jax.Array] | None]:
    """A weight's numbers for a slice of inputs, their conversion to float32, and a block's scales [*lead, 1].

    FP8 alone has scales.
    """
    if isinstance(w, Bf16 | Fp8):
        bits = w.bits.reshape(*lead, w.shape[-1])
        if isinstance(w, Bf16):
            return lambda part: bits[..., part], bf16_of_bits, None
        return lambda part: bits[..., part], e4m3_of_bits, lambda block: _scale(w, block).reshape(*lead, 1)
    assert not isinstance(w, Narrow), f"no loop reads {type(w).__name__}"
    values = w.reshape(*lead, w.shape[-1])
    return lambda part: values[..., part], lambda some: some.astype(jnp.float32), None


def _scale(w: Fp8, block: int) -> Float[Array, "*s o"]:
    """The scale of each output for a block of inputs, in units of ``e4m3_of_bits``."""
    scale = w.scale[..., block]
    outputs = math.prod(w.shape[:-1]) // math.prod(scale.shape[:-1])
    return jnp.repeat(scale * E4M3_UNIT, FP8_BLOCK, axis=-1)[..., :outputs]


def _slices(inputs: int, unit: int, most: int) -> list[slice]:
    """Slices of the inputs of equal size, of which a whole number is a ``unit``; about ``most`` at most."""
    step = math.gcd(unit, _LANES)
    least = min(-(-inputs // (step * max(most, 1))) * step, unit)
    lanes = next(n for n in range(least, unit + 1, step) if unit % n == 0)
    return [slice(at, at + lanes) for at in range(0, inputs, lanes)]
