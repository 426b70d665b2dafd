"""Grouped matrix product in plain jnp: the oracle, and what runs where there is no Hopper GPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
FP8_MAX = 448.0
TINY = 1e-10


def quantise(x: Float[Array, "M K"]) -> tuple[Float[Array, "M K"], Float[Array, "k M"]]:
    """e4m3 values and the float32 scales of their 1x128 blocks, transposed (arXiv 2412.19437, section 3.3.2).

    K must be a multiple of 128. A block's largest magnitude becomes 448, the largest e4m3 number.
    """
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, BLOCK)
    scale = jnp.maximum(jnp.abs(blocks).max(axis=-1), TINY) * (1 / FP8_MAX)
    values = (blocks * (1 / scale)[..., None]).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scale.T


def expand_weights(
    w: Float[Array, "*E N K"], scale: Float[Array, "*E n k"], dtype: Any = jnp.float32
) -> Float[Array, "*E N K"]:
    """Weights times the scales of their 128x128 blocks; blocks at the edges may be partial."""
    rows, columns = w.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, axis=-2), BLOCK, axis=-1)[..., :rows, :columns]
    return (w.astype(jnp.float32) * spread).astype(dtype)


def expand_rows(x: Float[Array, "M K"], scale: Float[Array, "k M"]) -> Float[Array, "M K"]:
    """Activations times the scales of their 1x128 blocks, float32."""
    return x.astype(jnp.float32) * jnp.repeat(scale.T, BLOCK, axis=-1)


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
    x32 = x.astype(jnp.float32) if x_scale is None else expand_rows(x, x_scale)
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
    return (gated,) if x_scale is None else quantise(gated)
