"""The functions that a model calls."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from kernels_pallas.expert_layout.api import arrange
from kernels_pallas.grouped_matmul import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.ending import PLAIN, ProductEnding
from kernels_pallas.grouped_matmul.layout import Groups, Tiles, few, group_all, group_rows, slots
from kernels_pallas.grouped_matmul.tile import FP4_SCALES_TERMS, Tile
from kernels_pallas.mosaic import WGMMA_ROWS, Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.quantised import BLOCK, Quantised, quantise
from kernels_pallas.splits import CLUSTER, GROUPS, PROCESSORS
from kernels_pallas.weighed import Weighed


def expert_mlp(
    x: Float[Array, "T D"] | Quantised,
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E 2 I D"] | UInt8[Array, "E 2 I _c"],
    down: Float[Array, "E D I"] | UInt8[Array, "E D _c"],
    gate_up_scale: Float[Array, "E 2 i d"] | UInt8[Array, "E 2 I _g"] | None,
    down_scale: Float[Array, "E d i"] | UInt8[Array, "E D _g"] | None,
    *,
    implementation: Implementation,
    counts: Int[Array, "n A"] | None = None,
    groups: Groups | None = None,
    shards: int = 1,
    first: Int[Array, ""] | int = 0,
    limit: float | None = None,
    summed: bool = True,
    interpret: Interpreter | None = None,
) -> Any:
    """Each row's chosen experts, weighted: ``sum_k weights * down(silu(gate(x)) * up(x))``, within the limit.

    FP8 weights multiply activations quantised to e4m3 in 1x128 blocks, once before each product.

    Args:
        x: bfloat16, or quantised before; only the first T rows, one per row of ``ids``, are read.
        ids: different experts chosen by each row, int32; an expert outside ``[first, first + E)`` contributes
            nothing.
        weights: float32.
        gate_up: e4m3 with ``gate_up_scale``, or bfloat16 without; output features first. Or FP4, uint8, two
            values each.
        down: likewise, with ``down_scale``.
        gate_up_scale: float32 scales of 128x128 blocks; of FP4 uint8, the exponents of 1x32 groups.
        down_scale: likewise.
        counts: int32; choices of each of the A experts per 4 tokens; with them a kernel lays out rows.
        groups: the layout of the rows, if it was made with the choice.
        shards: number of devices that share the choices; tiles depend on the mean number of an expert's rows.
        first: number, among A, of the first of the E experts.
        limit: largest gate, see ``ProductEnding``; None: it has none.
        summed: False leaves weighing to the reader.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        bfloat16 [T, D], summed in float32; `Weighed` if not summed.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    check(x, gate_up, gate_up_scale)
    check(x, down, down_scale)
    (experts, _, inner, _), terms, is_fp4 = gate_up.shape, x.shape[1], gate_up.dtype == jnp.uint8
    rows_per_expert, expected = -(-ids.size // (experts * shards)), -(-ids.size // shards)
    sizes = min(expected, experts), inner, terms
    gated = choose_fp4_gated_tile(*sizes) if is_fp4 else choose_gated_tile(rows_per_expert, *sizes)
    if groups is None and few(len(ids)):
        groups = group_all(ids - first, experts, gated.rows)
    elif groups is None and (counts is None or experts % 8):
        groups = group_rows(ids - first, experts, gated.rows)
    elif groups is None:
        assert counts is not None
        groups = arrange(
            ids,
            counts,
            jnp.reshape(jnp.asarray(first, jnp.int32), 1),
            experts=experts,
            rows=gated.rows,
            implementation=implementation,
            interpret=interpret,
        )
    if not isinstance(x, Quantised) and gate_up_scale is not None and not is_fp4:
        x = quantise(x)
    rows, scale = _of_tiles(x, groups, gated.rows)
    total = slots(ids.size, experts, gated.rows) if groups.token is None else None
    hidden = grouped_matmul(
        rows,
        gate_up,
        scale,
        gate_up_scale,
        groups.tiles,
        gated,
        implementation,
        interpret,
        ending=ProductEnding(total, limit),
    )
    plain = choose_fp4_tile(down.shape[1]) if is_fp4 else choose_tile(rows_per_expert, down.shape[1])
    hidden, scale = hidden if len(hidden) == 2 else (hidden[0], None)
    down_scale = None if down_scale is None else down_scale[:, None]
    (y,) = grouped_matmul(
        hidden, down[:, None], scale, down_scale, groups.tiles, plain, implementation, interpret
    )
    found = Weighed(y, groups.place, weights.T, (len(ids), y.shape[1]))
    return found.summed() if summed else found


def _of_tiles(
    x: Float[Array, "T D"] | Quantised, groups: Groups, rows: int
) -> tuple[Float[Array, "M D"], Float[Array, "d R"] | None]:
    """The rows that the tiles of ``rows`` rows read, and their scales."""
    if groups.token is None:
        if not isinstance(x, Quantised):
            return jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0))), None
        whole = x.padded(rows)
        return whole.values, whole.scale
    token = jnp.clip(groups.token, 0, x.shape[0] - 1)
    if not isinstance(x, Quantised):
        return x[token], None
    first = groups.tiles.table[1][:, None]
    return x.values[token], x.scale[:, token[(first + jnp.arange(rows)).reshape(-1)]]


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"] | UInt8[Array, "E b N _c"],
    x_scale: Float[Array, "k R"] | None,
    w_scale: Float[Array, "E b n k"] | UInt8[Array, "E b N _g"] | None,
    tiles: Tiles,
    tile: Tile,
    implementation: Implementation,
    interpret: Interpreter | None = None,
    *,
    ending: ProductEnding = PLAIN,
) -> tuple[Array, ...]:
    """``mosaic_gpu.grouped_matmul``, or the reference with implementation "xla"."""
    if implementation == "mosaic_gpu":
        return mosaic_gpu.grouped_matmul(
            x, w, x_scale, w_scale, tiles, tile=tile, ending=ending, interpret=interpret
        )
    y = reference.grouped_matmul(x, w, x_scale, w_scale, tiles, rows=tile.rows, ending=ending)
    return y if len(y) == 2 else (y[0].astype(jnp.bfloat16),)


def choose_tile(rows_per_group: int, columns: int) -> Tile:
    """Choose the tile of a product whose groups have ``rows_per_group`` rows on average."""
    if rows_per_group <= WGMMA_ROWS:
        return Tile(WGMMA_ROWS, 256 if columns % 256 == 0 else BLOCK)
    # 256 rows ask the second-level cache for fewer bytes per row than twice 128, even if half is empty.
    return Tile(4 * WGMMA_ROWS if rows_per_group > 2 * WGMMA_ROWS else 2 * WGMMA_ROWS, BLOCK)


def choose_gated_tile(rows_per_group: int, groups: int, columns: int, terms: int) -> Tile:
    """Choose the tile with which a gated product of ``groups`` groups ends soonest.

    K is split if tiles leave most of the GPU idle, into no more parts than run at once. A cluster lies in one
    of the GPU's 7 or 8 groups of multiprocessors: a group surely holds one cluster of 8, and 16 clusters of 8
    did not run at once on an H200.
    """
    if rows_per_group > WGMMA_ROWS:
        return Tile(2 * WGMMA_ROWS, BLOCK)
    tiles, steps = groups * (columns // BLOCK), terms // BLOCK
    most = CLUSTER if tiles <= GROUPS else CLUSTER // 2
    splits = [n for n in range(2, most + 1) if steps % n == 0 and tiles * n <= PROCESSORS]
    best = max(splits, default=1)
    return Tile(WGMMA_ROWS, BLOCK, stages=5 if best == 1 else 4, splits=best)


def choose_fp4_tile(columns: int) -> Tile:
    """Choose the tile of a product with FP4 weights, which has 64 rows for any number of a group's rows.

    The room for expanded weights leaves taller tiles too few stages, and 64 rows keep the tensor cores as
    busy as expanding does.
    """
    return Tile(WGMMA_ROWS, 256, stages=3) if columns % 256 == 0 else Tile(WGMMA_ROWS, BLOCK)


def choose_fp4_gated_tile(groups: int, columns: int, terms: int) -> Tile:
    """Choose the tile of a gated product with FP4 weights; K is split as ``choose_gated_tile`` does."""
    tile = choose_gated_tile(1, groups, columns, terms)
    return replace(tile, stages=4 if tile.splits == 1 else 3)


def check(x: ArrayOrShape | Quantised, w: ArrayOrShape, w_scale: ArrayOrShape | None) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError; looks at shapes and dtypes."""
    columns, terms = w.shape[-2:]
    is_fp4 = w.dtype == jnp.uint8
    if is_fp4:
        terms *= 2
    quantised = isinstance(x, Quantised) and w_scale is not None and not is_fp4
    depth = FP4_SCALES_TERMS if is_fp4 else BLOCK
    known = "bfloat16" if w_scale is None else "uint8" if is_fp4 else "float8_e4m3fn"
    need(
        "grouped_matmul",
        ("dtype of activations", str(x.dtype), ("float8_e4m3fn" if quantised else "bfloat16",)),
        ("dtype of weights", str(w.dtype), (known,)),
        (f"rest of output features over {BLOCK}", columns % BLOCK, (0,)),
        (f"rest of input features over {depth}", terms % depth, (0,)),
    )
