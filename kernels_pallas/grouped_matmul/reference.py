"""Grouped matrix product in plain jnp: the oracle, and what runs where there is no Hopper GPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.quantised import BLOCK, Quantised, quantise


def expand_weights(
    w: Float[Array, "*E N K"], scale: Float[Array, "*E n k"], dtype: Any = jnp.float32
) -> Float[Array, "*E N K"]:
    """Weights times the scales of their 128x128 blocks; blocks at the edges may be partial."""
    rows, columns = w.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, axis=-2), BLOCK, axis=-1)[..., :rows, :columns]
    return (w.astype(jnp.float32) * spread).astype(dtype)


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"],
    x_scale: Float[Array, "k M"] | None,
    w_scale: Float[Array, "E b n k"] | None,
    tile_group: Int[Array, " t"],
    end: Int[Array, " g"],
) -> tuple[Array, ...]:
    """What ``mosaic_gpu.grouped_matmul`` computes, float32 throughout; tiles that hold nothing are zero.

    Returns float32 [M, N]; e4m3 values and their scales when gated and FP8.
    """
    rows = x.shape[0] // tile_group.shape[0]
    x32 = x.astype(jnp.float32) if x_scale is None else Quantised(x, x_scale).expand()
    w32 = w.astype(jnp.float32) if w_scale is None else expand_weights(w, w_scale)
    tiles = x32.reshape(-1, rows, x.shape[1])
    held = jnp.arange(tile_group.shape[0]) < end[-1]

    def one(tile: Any) -> Float[Array, "b r N"]:
        x, group, held = tile
        y = jnp.einsum("rk,bnk->brn", x, w32[group], precision=jax.lax.Precision.HIGHEST)
        return jnp.where(held, y, 0)

    y = jax.lax.map(one, (tiles, tile_group, held))
    y = y.transpose(1, 0, 2, 3).reshape(w.shape[1], x.shape[0], -1)
    if w.shape[1] == 1:
        return (y[0],)
    gated = jax.nn.silu(y[0]) * y[1]
    if x_scale is None:
        return (gated,)
    quantised = quantise(gated)
    return quantised.values, quantised.scale
