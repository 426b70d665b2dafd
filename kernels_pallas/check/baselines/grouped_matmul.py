"""Baselines that compute a grouped product on a GPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.grouped_matmul.layout import Tiles
from kernels_pallas.grouped_matmul.reference import expand_fp4, expand_weights
from kernels_pallas.quantised import Quantised


def xla(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"],
    x_scale: Float[Array, "k R"] | None,
    w_scale: Float[Array, "E b n k"] | None,
    tiles: Tiles,
    *,
    rows: int,
) -> Array:
    """``lax.ragged_dot`` in bfloat16, after expanding narrow operands."""
    group, first, height = tiles.table
    sizes = jnp.zeros(w.shape[0], jnp.int32).at[group].add(height)
    left = x
    if x_scale is not None:
        # Scales lie by tile.
        to = jnp.where(jnp.arange(rows) < height[:, None], first[:, None] + jnp.arange(rows), x.shape[0])
        scale = jnp.zeros((x_scale.shape[0], x.shape[0])).at[:, to.reshape(-1)].set(x_scale, mode="drop")
        left = Quantised(x, scale).expand().astype(jnp.bfloat16)
    right = w
    if w_scale is not None:
        expand = expand_fp4 if w.dtype == jnp.uint8 else expand_weights
        right = expand(w, w_scale).astype(jnp.bfloat16)
    right = right.reshape(w.shape[0], -1, right.shape[-1]).swapaxes(1, 2)
    y = jax.lax.ragged_dot(left, right, sizes)
    if w.shape[1] == 1:
        return y
    gate, up = jnp.split(y, 2, axis=1)
    return jax.nn.silu(gate) * up
