"""The grouped products of kernels_pallas.grouped_matmul with a single group, and the sum of splits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas.grouped_matmul import mosaic_gpu as grouped
from kernels_pallas.grouped_matmul.ending import ProductEnding
from kernels_pallas.grouped_matmul.layout import Tiles
from kernels_pallas.grouped_matmul.tile import Tile
from kernels_pallas.mosaic import Interpreter


def fp8_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "1 N K"] | tuple[Float[Array, "1 _ K"], ...],
    x_scale: Float[Array, "k M"],
    w_scale: Float[Array, "1 n k"] | tuple[Float[Array, "1 _ k"], ...],
    *,
    tile: Tile,
    left: int | None = None,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """``x @ w.T``: bfloat16 [M, N], for each weight.

    Args:
        x: e4m3; M is a multiple of ``tile.rows``.
        w: e4m3, output features first; or several, whose tiles are one launch.
        x_scale: float32 scales of 1x128 blocks of x, transposed.
        w_scale: float32 scales of 128x128 blocks of w.
        tile: cut of the work.
        left: number of rows whose parts of K, float32 [splits, ``left``, N], are left to the reader: M, or
            fewer, a multiple of 8, if x is one tile. None: all are summed.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: dtypes or sizes that do not fit the tile.
    """
    rows = x.shape[0]
    few = left if left is not None and left < rows else None
    tiles, ending = _tiles(rows, tile, few), ProductEnding(few)
    weights, scales = jax.tree.map(lambda a: a[None], (w, w_scale))
    cut = partial(grouped.grouped_matmul, tile=tile, ending=ending, interpret=interpret)
    out = cut(x, weights, x_scale, scales, tiles)
    if tile.splits == 1 or left is not None:
        return out
    return tuple(y.sum(axis=0).astype(jnp.bfloat16) for y in out)


def fp8_gated(
    x: Float[Array, "M K"],
    w: Float[Array, "2 N K"],
    x_scale: Float[Array, "k M"],
    w_scale: Float[Array, "2 n k"],
    *,
    tile: Tile,
    limit: float | None = None,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """``silu(gate) * up`` of two products as of ``fp8_matmul``: e4m3 [M, N], and its scales [N/128, M].

    limit: largest gate, see ``ProductEnding``.

    Raises ValueError for dtypes or sizes that do not fit the tile.
    """
    given, ending = (x, w[None], x_scale, w_scale[None]), ProductEnding(limit=limit)
    tiles = _tiles(x.shape[0], tile)
    return grouped.grouped_matmul(*given, tiles, tile=tile, ending=ending, interpret=interpret)


def _tiles(rows: int, tile: Tile, kept: int | None = None) -> Tiles:
    """The tiles of a single group. kept: rows of a tile that are written."""
    first = np.arange(0, rows, tile.rows, dtype=np.int32)
    # One array, so that it is a constant of the program: XLA would fill several arrays by launches.
    table = np.stack([np.zeros_like(first), first, np.full_like(first, kept or tile.rows)])
    return Tiles(jnp.asarray(table), jnp.asarray(np.array([first.size], np.int32)))
