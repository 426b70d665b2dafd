"""Products with FP8 weights in plain jnp: the oracle, and the implementation without a Hopper GPU."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.grouped_matmul import reference as grouped
from kernels_pallas.grouped_matmul.ending import ProductEnding
from kernels_pallas.grouped_matmul.layout import Tiles


def fp8_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "b N K"] | tuple[Float[Array, "1 _ K"], ...],
    x_scale: Float[Array, "k M"],
    w_scale: Float[Array, "b n k"] | tuple[Float[Array, "1 _ k"], ...],
    limit: float | None = None,
) -> tuple[Array, ...]:
    """The result of ``mosaic_gpu.fp8_matmul``: float32 [M, N]; of ``fp8_gated`` with b = 2."""
    if isinstance(w, tuple) or isinstance(w_scale, tuple):
        each = (fp8_matmul(x, own, x_scale, scale) for own, scale in zip(w, w_scale, strict=True))
        return tuple(y for (y,) in each)
    rows = x.shape[0]
    tiles = Tiles(jnp.array([[0], [0], [rows]], jnp.int32), jnp.ones(1, jnp.int32))
    ending = ProductEnding(limit=limit)
    return grouped.grouped_matmul(x, w[None], x_scale, w_scale[None], tiles, rows=rows, ending=ending)
