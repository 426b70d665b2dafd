"""Grouped matrix product in plain jnp: the oracle, and the implementation without a Hopper GPU."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from kernels_pallas.grouped_matmul.ending import PLAIN, ProductEnding
from kernels_pallas.grouped_matmul.layout import Tiles
from kernels_pallas.quantised import BLOCK, Quantised, quantise

FP4_GROUP = 32
"""Values of a row of FP4 that share a scale."""


def expand_weights(
    w: Float[Array, "*E N K"], scale: Float[Array, "*E n k"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*E N K"]:
    """Weights times the scales of their 128x128 blocks; blocks at the edges may be partial."""
    rows, columns = w.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, axis=-2), BLOCK, axis=-1)[..., :rows, :columns]
    return (w.astype(jnp.float32) * spread).astype(dtype)


def expand_fp4(codes: UInt8[Array, "*E N c"], exponents: UInt8[Array, "*E N k"]) -> Float[Array, "*E N K"]:
    """e2m1 values, two to a byte, the low four bits first, times a power of two for each 32 of a row.

    Exponents are e8m0: x stands for 2^(x - 127). Returns float32.
    """
    code = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    size = (code & 7).astype(jnp.uint32)
    # The exponents' biases are 1 and 127; 0 and 0.5 are subnormal numbers of e2m1.
    normal = jax.lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    value = jnp.where(size < 2, size.astype(jnp.float32) / 2, normal)
    scale = jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)
    return jnp.where(code > 7, -value, value) * jnp.repeat(scale, FP4_GROUP, axis=-1)


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"] | UInt8[Array, "E b N _c"],
    x_scale: Float[Array, "k R"] | None,
    w_scale: Float[Array, "E b n k"] | UInt8[Array, "E b N _g"] | None,
    tiles: Tiles,
    *,
    rows: int,
    ending: ProductEnding = PLAIN,
) -> tuple[Array, ...]:
    """The result of ``mosaic_gpu.grouped_matmul`` with tiles of ``rows`` rows, float32 throughout.

    Rows of no tile are zero. Returns float32 [M, N]; e4m3 values and their scales when gated and FP8.
    """
    slots, limit = ending.slots, ending.limit
    group, first, height = tiles.table
    row = jnp.arange(rows)
    index = first[:, None] + row
    total = x.shape[0] if slots is None else slots
    held = (row < height[:, None]) & (jnp.arange(group.shape[0]) < tiles.count)[:, None]
    if slots is None:
        parts = x[index.reshape(-1)]
    else:
        parts = jnp.tile(x[:rows], (group.shape[0], 1))
        x_scale = None if x_scale is None else jnp.tile(x_scale[:, :rows], (1, group.shape[0]))
    x32 = parts.astype(jnp.float32) if x_scale is None else Quantised(parts, x_scale).expand()
    expand = expand_weights if w.dtype != jnp.uint8 else expand_fp4

    def one(tile: tuple[Array, Array, Array]) -> Float[Array, "b r N"]:
        x, group, held = tile
        w32 = w[group].astype(jnp.float32) if w_scale is None else expand(w[group], w_scale[group])
        y = jnp.einsum("rk,bnk->brn", x, w32, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(held[:, None], y, 0)

    y = jax.lax.map(one, (x32.reshape(-1, rows, x.shape[1]), group, held))
    y = y.transpose(1, 0, 2, 3).reshape(w.shape[1], parts.shape[0], -1)

    def in_place(values: Float[Array, "R N"]) -> Float[Array, "M N"]:
        to = jnp.where(held, index, total).reshape(-1)
        return jnp.zeros((total, values.shape[1]), values.dtype).at[to].set(values, mode="drop")

    if w.shape[1] == 1:
        return (in_place(y[0]),)
    gate, up = y if limit is None else (jnp.minimum(y[0], limit), jnp.clip(y[1], -limit, limit))
    gated = jax.nn.silu(gate) * up
    if x_scale is None:
        return (in_place(gated),)
    quantised = quantise(gated)
    return in_place(quantised.values), quantised.scale
