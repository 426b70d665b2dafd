"""The functions that a model calls."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas.fp8_matmul import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.api import choose_gated_tile, grouped_matmul
from kernels_pallas.grouped_matmul.layout import ALIGNMENT, Tiles, few
from kernels_pallas.grouped_matmul.tile import Tile
from kernels_pallas.mosaic import WGMMA_ROWS, Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.quantised import BLOCK, Quantised, quantise, whole_tiles
from kernels_pallas.rms_norm import api as norms
from kernels_pallas.splits import PROCESSORS

# Bytes of a tile's ring, in rows of 128 bytes: the cost of filling it, beside the rows that the tile loads.
_START = 512


def fp8_matmul(
    x: Float[Array, "T K"] | Quantised,
    w: Float[Array, "N K"],
    w_scale: Float[Array, "n k"],
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Float[Array, "T N"]:
    """``x @ w.T`` with x quantised to e4m3 in 1x128 blocks, summed in float32.

    Args:
        x: bfloat16 rows, or rows quantised before.
        w: e4m3, output features first; N a multiple of 64, K of 128.
        w_scale: float32 scales of 128x128 blocks, the last blocks perhaps partial.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        bfloat16.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    check(x, w, 64)
    count = x.shape[0]
    tile = choose_tile(count, w.shape[1], w.shape[0])
    rows = _quantised(x, tile, implementation)
    (y,) = _product(implementation, tile, interpret)(rows.values, w[None], rows.scale, w_scale[None])
    return y[:count].astype(jnp.bfloat16)


def fp8_parts(
    x: Float[Array, "T K"] | Quantised,
    weights: Sequence[tuple[Float[Array, "_ K"], Float[Array, "_ k"]]],
    rows: int,
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> list[Float[Array, "s M _"]]:
    """``fp8_matmul`` of each weight and its scales, for a reader that sums: two launches fewer.

    One launch multiplies all weights where it takes no longer.

    rows: number of rows that count, the first.

    Returns:
        The parts of K that a kernel sums apart, float32 if there are several, else bfloat16; M is 8 if no
        more rows count, else whole tiles of rows.
    """
    for w, _ in weights:
        check(x, w, 64)
    count, terms, each = x.shape[0], x.shape[1], [w.shape[0] for w, _ in weights]
    if len(each) > 1 and not one_launch(count, terms, *each):
        apart = partial(fp8_parts, x, rows=rows, implementation=implementation, interpret=interpret)
        return [y for own in weights for y in apart([own])]
    tile = choose_tile(count, terms, *each)
    given = _quantised(x, tile, implementation)
    left = ALIGNMENT if few(rows) else given.shape[0]
    ws, scales = zip(*((w[None], scale[None]) for w, scale in weights), strict=True)
    if len(each) == 1:
        (ws,), (scales,) = ws, scales
    if implementation == "mosaic_gpu":
        run = partial(mosaic_gpu.fp8_matmul, tile=tile, left=left, interpret=interpret)
        out = run(given.values, ws, given.scale, scales)
    else:
        out = [y[:left] for y in reference.fp8_matmul(given.values, ws, given.scale, scales)]
    return [y if y.ndim == 3 else y.astype(jnp.bfloat16)[None] for y in out]


def fp8_mlp(
    x: Float[Array, "T D"] | Quantised,
    gate_up: Float[Array, "2 I D"],
    down: Float[Array, "D I"],
    gate_up_scale: Float[Array, "2 i d"],
    down_scale: Float[Array, "d i"],
    *,
    implementation: Implementation,
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """``down(silu(gate(x)) * up(x))`` of FP8 weights, as ``fp8_matmul``; I and D multiples of 128.

    limit: largest gate, see ``ProductEnding``. Raises ValueError for inputs that the kernel cannot take.
    """
    check(x, gate_up, BLOCK)
    check(x, down, BLOCK)
    count = x.shape[0]
    gated = choose_gated_tile(count, 1, *gate_up.shape[1:])
    rows = _quantised(x, gated, implementation)
    given = rows.values, gate_up, rows.scale, gate_up_scale
    if implementation == "mosaic_gpu":
        hidden, scale = mosaic_gpu.fp8_gated(*given, tile=gated, limit=limit)
    else:
        hidden, scale = reference.fp8_matmul(*given, limit)
    tile = choose_tile(count, down.shape[1], down.shape[0])
    (y,) = _product(implementation, tile)(hidden, down[None], scale, down_scale[None])
    return y[:count].astype(jnp.bfloat16)


def fp8_by_group(
    x: Float[Array, "T G K"],
    w: Float[Array, "G N K"],
    w_scale: Float[Array, "G n k"],
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Float[Array, "T G N"]:
    """``x[:, g] @ w[g].T`` for every group g, as ``fp8_matmul``. The product is one launch."""
    check(jax.ShapeDtypeStruct((*x.shape[:1], x.shape[2]), x.dtype), w, 64)
    (count, groups, terms), columns = x.shape, w.shape[1]
    height = min(whole_tiles(count), 2 * WGMMA_ROWS)
    each = -(-count // height)
    number = np.arange(groups * each)
    widths = [n for n in (256, 128, 64) if columns % n == 0 and height + n <= 320]
    # The widest columns with which every multiprocessor has a tile, else the narrowest.
    width = next((n for n in widths if len(number) * (columns // n) >= PROCESSORS), widths[-1])
    tile = Tile(height, width)
    left = -(-count // ALIGNMENT) * ALIGNMENT - number % each * height
    table = np.stack([number // each, number * height, np.minimum(left, height)]).astype(np.int32)
    tiles = Tiles(jnp.asarray(table), jnp.full(1, len(number), jnp.int32))
    laid = jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, each * height - count), (0, 0)))
    rows = _quantised(laid.reshape(-1, terms), tile, implementation)
    given = rows.values, w[:, None], rows.scale, w_scale[:, None], tiles, tile, implementation, interpret
    (y,) = grouped_matmul(*given)
    return y.reshape(groups, -1, columns)[:, :count].swapaxes(0, 1)


def one_launch(rows: int, terms: int, *columns: int) -> bool:
    """Whether products with several weights end no later in one launch, its start left out."""

    def cost(*columns: int) -> int:
        return _cost(choose_tile(rows, terms, *columns), rows, terms, *columns)[0]

    return cost(*columns) <= sum(map(cost, columns))


def choose_tile(rows: int, terms: int, *columns: int) -> Tile:
    """Choose the tile with which a product ends soonest, by the rows of operands that a thread block loads.

    Parts of K are written and read again as float32, so more parts keep more of the GPU busy at that cost.

    columns: output features of each weight.
    """
    splits = [n for n in range(1, 17) if terms // BLOCK % n == 0]
    if rows <= 64:
        tiles = [Tile(64, n, splits=s) for n in (256, 128, 64) for s in splits]
    else:
        heights = (128,) if whole_tiles(rows) % 256 else (128, 256)
        tiles = [Tile(h, n, splits=s) for h in heights for n in (128, 64) for s in splits]
    fitting = (tile for tile in tiles if not any(n % tile.columns for n in columns))
    return min(fitting, key=lambda tile: _cost(tile, rows, terms, *columns))


def _cost(tile: Tile, rows: int, terms: int, *columns: int) -> tuple[int, int]:
    """Rows of operands that the busiest multiprocessor loads, and the number of parts."""
    pair = tile.pair
    tiles = -(-rows // tile.rows) * (sum(columns) // tile.columns) * tile.splits
    waves = -(-tiles * pair // PROCESSORS)
    partial_sums = tile.rows // pair * tile.columns * 8 // BLOCK if tile.splits > 1 else 0
    loaded = tile.rows // pair + tile.columns // pair
    return waves * (terms // BLOCK // tile.splits * loaded + partial_sums + _START), tile.splits


def _quantised(x: Float[Array, "T K"] | Quantised, tile: Tile, implementation: Implementation) -> Quantised:
    """Rows in e4m3, of whole tiles: by a kernel, if it takes their width; XLA's own way is three launches."""
    if isinstance(x, Quantised):
        return x.padded(tile.rows)
    if implementation == "mosaic_gpu" and x.shape[1] % norms.WIDTHS == 0:
        blocks = x.reshape(x.shape[0], -1, BLOCK)
        return norms.quantise(blocks, blocks_first=False, implementation=implementation).padded(tile.rows)
    return quantise(jnp.pad(x, ((0, -x.shape[0] % tile.rows), (0, 0))))


def _product(
    implementation: Implementation, tile: Tile, interpret: Interpreter | None = None
) -> Callable[..., tuple[Array, ...]]:
    if implementation == "mosaic_gpu":
        return partial(mosaic_gpu.fp8_matmul, tile=tile, interpret=interpret)
    return reference.fp8_matmul


def check(x: ArrayOrShape | Quantised, w: ArrayOrShape, columns: int) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError; looks at shapes and dtypes."""
    given = "float8_e4m3fn" if isinstance(x, Quantised) else "bfloat16"
    need(
        "fp8_matmul",
        ("dtype of activations", str(x.dtype), (given,)),
        ("dtype of weights", str(w.dtype), ("float8_e4m3fn",)),
        (f"rest of output features over {columns}", w.shape[-2] % columns, (0,)),
        (f"rest of input features over {BLOCK}", w.shape[-1] % BLOCK, (0,)),
    )
