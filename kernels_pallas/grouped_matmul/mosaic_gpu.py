"""Grouped matrix product for Hopper: persistent, warp-specialised, block-scaled FP8 or bfloat16.

Two warpgroups multiply and one loads. Each thread block walks over output tiles, group by group, and its
loader runs ahead across tiles, so that weights are read without a pause: most of decoding's time. FP8
products are summed in two levels (arXiv 2412.19437, section 3.3.2; github.com/deepseek-ai/DeepGEMM): the
tensor cores sum 128 terms, which are scaled while they are added to a float32 sum in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt8

from kernels_pallas.grouped_matmul.ending import PLAIN, ProductEnding
from kernels_pallas.grouped_matmul.layout import Tiles
from kernels_pallas.grouped_matmul.tile import COMPUTE, ProductSizes, Tile
from kernels_pallas.grouped_matmul.walk import Walk
from kernels_pallas.mosaic import Interpreter, Ref

_LOADER = COMPUTE
# Registers of 504 for three warpgroups. With more for the computing warpgroups ptxas 13.5 hoists more, and
# spills.
_LOADER_REGISTERS, _COMPUTE_REGISTERS = 56, 224


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"] | tuple[Float[Array, "E 1 _ K"], ...] | UInt8[Array, "E b N _c"],
    x_scale: Float[Array, "k R"] | None,
    w_scale: Float[Array, "E b n k"] | tuple[Float[Array, "E 1 _ k"], ...] | UInt8[Array, "E b N _g"] | None,
    tiles: Tiles,
    *,
    tile: Tile,
    ending: ProductEnding = PLAIN,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """``x @ w[group].T`` for tiles of rows that belong to one group each; SwiGLU of two products if b is 2.

    Scales of rows lie by tile, ``tile.rows`` for each of the t tiles (R in all), wherever its rows of x lie:
    copies of scales have to begin at multiples of 32, rows of a group need not.

    Args:
        x: e4m3 or bfloat16; ``tile.rows`` rows from each tile's first on are read, and must be there.
        w: weights of x's dtype, output features before input features; b is 1, or 2 for gate and up. Several
            weights, whose columns are tiles one after the other, have a result each; b is 1. Or, with x in
            bfloat16, FP4 (``fp4.py``): uint8, two values each.
        x_scale: float32 scales of 1x128 blocks of the tiles' rows, transposed; None for bfloat16.
        w_scale: float32 scales of 128x128 blocks of w, the last blocks perhaps partial; None for bfloat16.
            FP4 weights have uint8, the exponents of 1x32 groups.
        tiles: the rows of each tile, and its group in w. Rows of no tile are not written.
        ending: the way to the results. With ``slots`` all tiles multiply the same rows, the first of x, whose
            scales x_scale begins with; else each tile has rows of its own, and M rows are returned.
        tile: cut of the work. interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        b = 1: bfloat16 [M, N], or float32 [splits, M, N] parts to be summed when ``splits`` is not 1.
        b = 2: silu(gate) * up: bfloat16 [M, N]; of e4m3, e4m3 [M, N] and its scales [N/128, R].

    Raises:
        ValueError: dtypes and sizes that the tile does not fit.
    """
    ws = w if isinstance(w, tuple) else (w,)
    w_scales = w_scale if isinstance(w_scale, tuple) else (w_scale,)
    each, gated, is_fp4 = tuple(own.shape[2] for own in ws), ws[0].shape[1] == 2, ws[0].dtype == jnp.uint8
    of_call = x.shape[0], sum(each), x.shape[1], tiles.table.shape[1], ending, is_fp4
    sizes = ProductSizes(tile, x.dtype, gated, *of_call, each if len(each) > 1 else ())
    operands = (x, ws, x_scale, w_scales) if sizes.fp8 else (x, ws, w_scale) if is_fp4 else (x, ws)
    results, parts = sizes.out_type(), sizes.parts_type() if sizes.gated else ()
    clusters: dict[str, Any] = {}
    if sizes.cluster > 1 or sizes.tile.pair > 1:
        clusters = {
            "cluster": (sizes.cluster * sizes.tile.pair,),
            "cluster_names": ("part" if sizes.cluster > 1 else "half",),
        }

    def body(*refs: Ref, **scratch: Ref) -> None:
        count = len(operands)
        out = refs[count + 2 :]
        half = lax.axis_index("half") if sizes.tile.pair > 1 else 0
        given = refs[:count], refs[count], refs[count + 1], half
        written = out[: len(results)], out[len(results) :]
        walk = Walk(sizes, *given, *written, scratch, interpret is not None)
        wg, walker = lax.axis_index("wg"), lax.axis_index("walker")
        if sizes.cluster > 1:
            walker = walker * sizes.cluster + lax.axis_index("part")
        total = refs[count + 1][0] * (sizes.column_tiles * tile.splits)
        mine = lax.div(total - walker + (sizes.walkers - 1), sizes.walkers)

        @pl.when(wg == _LOADER)
        def _load() -> None:
            plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            walk.load(walker, mine)

        @pl.when(wg < COMPUTE)
        def _compute() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            walk.compute(wg, walker, mine)

    out = plgpu.kernel(
        body,
        kernel_name="gated_matmul" if sizes.gated else "matmul",
        out_type=(*results, *parts),
        scratch_types=sizes.scratch(),
        grid=(sizes.walkers // sizes.cluster,),
        grid_names=("walker",),
        **clusters,
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands, tiles.table, tiles.count)
    return tuple(out[: len(results)])
