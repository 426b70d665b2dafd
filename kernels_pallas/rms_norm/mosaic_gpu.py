"""A warpgroup per row: the row stays in registers from the residual's sum to the written values and scales.

No shared memory and no barrier: a warp reads and writes one block of 128 numbers at a time, each lane four of
them, so that every access to memory is of consecutive bytes.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import Interpreter, Ref, load, store
from kernels_pallas.quantised import BLOCK, FP8_MAX, TINY, whole_tiles

# Rows [M, k, 128], places of each row's [c, T], weights [c, T]; see ``weighed``.
ChosenRows = tuple[Float[Array, "_ k 128"], Int[Array, "c T"], Float[Array, "c T"]]
# Blocks of a row, one per warp at a time; the 32 lanes of a warp hold four numbers each.
WARPS = 4
ROW = plgpu.Layout.TILED(Tiling(((WARPS, BLOCK), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
# Registers of a row in ``quantise``, which sums nothing over the row and need not hold all of it at once.
_CHUNK = 32


def rms_norm(
    addends: Sequence[Float[Array, "_ _ k 128"] | ChosenRows],
    weight: Float[Array, "k 128"],
    *,
    rows: int,
    eps: float,
    total: bool,
    plain: bool,
    quantised: bool,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """Sums of rows over their root mean square, times the weight.

    Args:
        addends: bfloat16 or float32, blocks of 128; their number k is a multiple of 4. The s rows of each
            array are summed, and the sums of all arrays. Rows past T are not read. An addend may also be
            rows, each result's places among them, and their weights.
        weight: any float type.
        rows: number of rows, T.
        eps: added to the mean square.
        total: whether to return the sum in bfloat16. plain: whether the result is wanted in bfloat16.
        quantised: whether it is wanted in e4m3.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        In this order, if requested: the sum in bfloat16 [T, k, 128], the result in bfloat16, its e4m3 values
        [M, k, 128] and float32 scales [k, M]. M is T rounded up to the tiles of products; rows past T are not
        written.
    """
    count = len(addends)
    blocks = weight.shape[0]

    def body(*refs: Ref) -> None:
        row, out = lax.axis_index("row"), list(refs[count + 1 :])
        each = []
        for ref in refs[:count]:
            each += _chosen(ref, row) if isinstance(ref, tuple) else _parts(ref, row)
        rounded = sum(each[1:], each[0]).astype(jnp.bfloat16)  # as between two launches
        x = rounded.astype(jnp.float32)
        if total:
            store(out.pop(0).at[row], rounded)
        square = jnp.sum(jnp.sum(x * x, axis=1)) * (1 / (blocks * BLOCK))
        normed = x * lax.rsqrt(square + eps) * load(refs[count], (), ROW).astype(jnp.float32)
        if plain:
            store(out.pop(0).at[row], normed.astype(jnp.bfloat16))
        if quantised:
            write(normed, out[0].at[row], out[1].at[:, row])

    out_type = [jax.ShapeDtypeStruct((rows, blocks, BLOCK), jnp.bfloat16)] * (total + plain)
    if quantised:
        out_type += quantised_type(rows, blocks)
    return tuple(_launch(body, out_type, {"row": rows}, interpret)(*addends, weight))


def _parts(ref: Ref, row: jax.Array) -> list[jax.Array]:
    """A row's parts."""
    return [load(ref, (part, row), ROW).astype(jnp.float32) for part in range(ref.shape[0])]


def _chosen(refs: tuple[Ref, ...], row: jax.Array) -> list[jax.Array]:
    """A row's chosen rows times their weights; zeros for a place past all rows, which may hold NaN."""
    rows, place, weights = refs
    found = []
    for k in range(place.shape[0]):
        at, last = place[k, row], rows.shape[0] - 1
        value = load(rows, (jnp.minimum(at, last),), ROW).astype(jnp.float32) * weights[k, row]
        there = jnp.zeros_like(value) + jnp.where(at <= last, 1.0, 0.0)
        found.append(jnp.where(there > 0.0, value, 0.0))
    return found


def quantise(
    x: Float[Array, "k T 128"] | Float[Array, "T k 128"],
    *,
    blocks_first: bool,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """e4m3 values [M, k, 128] and float32 scales [k, M] of rows; M and rows past T as in ``rms_norm``.

    blocks_first: x is [k, T, 128], as products of heads return it, not [T, k, 128].
    """
    rows, blocks = (x.shape[1], x.shape[0]) if blocks_first else x.shape[:2]
    chunk = max(n for n in range(WARPS, _CHUNK + 1, WARPS) if blocks % n == 0)

    def body(x_ref: Ref, values: Ref, scales: Ref) -> None:
        row, mine = lax.axis_index("row"), pl.ds(lax.axis_index("part") * chunk, chunk)
        part = load(x_ref, (mine, row) if blocks_first else (row, mine), ROW).astype(jnp.float32)
        write(part, values.at[row, mine], scales.at[mine, row])

    grid = {"part": blocks // chunk, "row": rows}
    return tuple(_launch(body, quantised_type(rows, blocks), grid, interpret)(x))


def write(x: jax.Array, values: Ref, scales: Ref) -> None:
    """Blocks as e4m3 values, and their scales."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1), TINY) * (1 / FP8_MAX)
    inverse = plgpu.layout_cast(lax.broadcast_in_dim(1 / scale, x.shape, [0]), ROW)
    store(values, (x * inverse).astype(values.dtype))
    store(scales, scale)


def quantised_type(rows: int, blocks: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of e4m3 values and of scales for ``rows`` rows, padded to whole tiles of products."""
    rows = whole_tiles(rows)
    return [
        jax.ShapeDtypeStruct((rows, blocks, BLOCK), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((blocks, rows), jnp.float32),
    ]


def _launch(
    body: Callable[..., None],
    out_type: list[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    interpret: Interpreter | None,
) -> Callable[..., Sequence[Array]]:
    """A kernel of one warpgroup per thread block."""
    return plgpu.kernel(
        body,
        kernel_name="rms_norm",
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
