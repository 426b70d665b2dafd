"""The layout of rows by expert for Hopper, in one launch.

A thread block places 64 tokens' choices of one rank. A slot is the sum of the sizes of earlier experts, the
choices of earlier blocks, and the choices of earlier tokens. Every thread block adds up the sizes itself from
the blocks' counts, so that none waits for another.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from kernels_pallas.grouped_matmul.layout import ALIGNMENT, Groups, Tiles, slots, tiles
from kernels_pallas.mosaic import (
    LINE,
    WGMMA_COLUMN,
    WGMMA_ROW,
    Interpreter,
    Ref,
    Warpgroup,
    lines,
    load,
    per_column,
    per_row,
    store,
)
from kernels_pallas.router import reference as router

ROWS = router.BLOCK
# Rows of counts that are added up at a time: the counts of 64 tokens.
_COUNTS = ROWS // router.ROWS
# Most tokens whose counts every thread block adds up; the counts of more tokens are first added up by 64.
# A decode step of 128 slots and window 4: 128 KiB for 256 experts.
_FEW = 512


def arrange(
    ids: Int[Array, "k T"],
    counts: Int[Array, "b E"],
    first: Int[Array, " one"],
    *,
    experts: int,
    rows: int,
    tokens: int,
    interpret: Interpreter | None = None,
) -> Groups:
    """``grouped_matmul.layout.group_rows`` of ``ids - first``.

    Args:
        ids: int32, transposed, different experts for each token; T is a multiple of 64.
        counts: int32; ``router.reference.count``; rows past the tokens may hold anything.
        first: int32; the first of the experts whose rows are laid out.
        experts: number of experts that are laid out, a multiple of 8.
        rows: number of rows of a tile.
        tokens: number of real tokens among T.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    chosen, blocks = ids.shape[0], ids.shape[1] // ROWS
    held = -(-tokens // router.ROWS)
    if many := tokens > _FEW:
        counts, held = _by_blocks(counts, held), blocks
    each = 1 if many else _COUNTS  # rows of counts of 64 tokens
    total = slots(tokens * chosen, experts, rows)
    chunks = -(-tiles(tokens * chosen, experts, rows) // ROWS)
    width = next(n for n in (64, 32, 16, 8) if experts % n == 0)
    layout = lines(min(width, LINE))
    wg = Warpgroup(interpret is not None)

    def body(ids: Ref, counts: Ref, first: Ref, *refs: Ref, **scratch: Ref) -> None:
        token, place, table, count = refs
        sizes, before, ends, places = (scratch[name] for name in ("sizes", "before", "ends", "places"))
        block, j = lax.axis_index("block"), lax.axis_index("choice")
        row, column = wg.iota((ROWS,), 0), wg.iota((ROWS, width), 1)
        line = wg.iota_of((_COUNTS, width), 0, layout)

        def row_sums(terms: Callable[[slice | pl.Slice, jax.Array], jax.Array]) -> jax.Array:
            """Sum over all experts, for each row, of ``terms`` of a slice of them and their numbers."""

            def add(c: jax.Array, sums: jax.Array) -> jax.Array:
                start = c * width
                return sums + jnp.sum(terms(pl.ds(start, width), column + start), axis=1)

            zero = wg.laid_out(jnp.zeros((ROWS,), jnp.int32), WGMMA_ROW)
            return lax.fori_loop(0, experts // width, add, zero)

        def spread(ref: Ref, part: slice | pl.Slice) -> jax.Array:
            return per_column(wg.laid_out(ref[part], WGMMA_COLUMN), ROWS)

        def add_up(c: jax.Array, _: None) -> None:
            def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                part = (pl.ds(i * _COUNTS, _COUNTS), pl.ds(first[0] + c * width, width))
                more, at = load(counts, part, layout), line + i * _COUNTS
                size, earlier = (jnp.where(at < end, more, 0) for end in (held, block * each))
                return sums[0] + size, sums[1] + earlier

            zero = wg.laid_out(jnp.zeros((_COUNTS, width), jnp.int32), layout)
            sums = lax.fori_loop(0, counts.shape[0] // _COUNTS, add, (zero, zero))
            size, earlier = (jnp.sum(x, axis=0) for x in sums)
            sizes[pl.ds(c * width, width)] = lax.div(size + (ALIGNMENT - 1), ALIGNMENT) * ALIGNMENT
            before[pl.ds(c * width, width)] = earlier

        def put(r: jax.Array, _: None) -> None:
            slot = places[r]

            @pl.when(slot < total)
            def _store() -> None:
                token[slot] = block * ROWS + r

        def needed(part: slice | pl.Slice) -> jax.Array:
            """Number of tiles of each expert."""
            return lax.div(spread(sizes, part) + (rows - 1), rows)

        def describe(i: jax.Array, _: None) -> None:
            """Write expert, first slot and number of slots of 64 tiles."""
            chunk = block * chosen + j + i * (blocks * chosen)
            tile = row + chunk * ROWS
            owner = row_sums(lambda part, _: jnp.where(spread(ends, part) <= per_row(tile, width), 1, 0))
            begin = row_sums(lambda part, e: jnp.where(e < per_row(owner, width), needed(part), 0))
            start = row_sums(lambda part, e: jnp.where(e < per_row(owner, width), spread(sizes, part), 0))
            size = row_sums(lambda part, e: jnp.where(e == per_row(owner, width), spread(sizes, part), 0))
            done = (tile - begin) * rows
            to = pl.ds(chunk * ROWS, ROWS)
            store(table.at[0, to], jnp.minimum(owner, experts - 1))
            store(table.at[1, to], start + done)
            store(table.at[2, to], jnp.minimum(jnp.maximum(size - done, 0), rows))

        lax.fori_loop(0, experts // width, add_up, None)
        mine = pl.ds(block * ROWS, ROWS)
        own = load(ids, (j, mine), WGMMA_ROW) - first[0]
        slot = row_sums(
            lambda part, e: jnp.where(
                e < per_row(own, width),
                spread(sizes, part),
                jnp.where(e == per_row(own, width), spread(before, part), 0),
            )
        )
        earlier_token = wg.iota((ROWS, ROWS), 1) < wg.iota((ROWS, ROWS), 0)
        for other in range(chosen):
            same = per_column(load(ids, (other, mine), WGMMA_COLUMN) - first[0], ROWS) == per_row(own, ROWS)
            slot += jnp.sum(jnp.where(jnp.logical_and(same, earlier_token), 1, 0), axis=1)
        here = jnp.logical_and(jnp.logical_and(own >= 0, own < experts), row + block * ROWS < tokens)
        slot = jnp.where(here, slot, total)
        store(place.at[j, mine], slot)
        places[...] = slot
        lax.fori_loop(0, ROWS, put, None)
        for c in range(0, experts, ROWS):
            last = per_row(row + c, width)
            end = row_sums(lambda part, e, last=last: jnp.where(e <= last, needed(part), 0))
            ends[pl.ds(c, ROWS)] = end

        @pl.when(jnp.logical_and(block == 0, j == 0))
        def _count() -> None:
            store(count, row_sums(lambda part, _: needed(part)))

        this = block * chosen + j
        lax.fori_loop(0, lax.div(chunks - this + blocks * chosen - 1, blocks * chosen), describe, None)

    token, place, table, count = plgpu.kernel(
        body,
        kernel_name="expert_layout",
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((total,), ids.shape, (3, chunks * ROWS), (ROWS,))
        ),
        scratch_types={
            "sizes": plgpu.SMEM((experts,), jnp.int32),
            "before": plgpu.SMEM((experts,), jnp.int32),
            "ends": plgpu.SMEM((-(-experts // ROWS) * ROWS,), jnp.int32),
            "places": plgpu.SMEM((ROWS,), jnp.int32),
        },
        grid=(blocks, chosen),
        grid_names=("block", "choice"),
        interpret=interpret,
    )(ids, counts, first)
    return Groups(token, place, Tiles(table, count))


def _by_blocks(counts: Int[Array, "b E"], held: int) -> Int[Array, "n E"]:
    """Add up the first ``held`` rows of counts for each 64 tokens, by XLA; rows of zeros follow."""
    row = jnp.arange(counts.shape[0])[:, None]
    sums = jnp.where(row < held, counts, 0).reshape(-1, _COUNTS, counts.shape[1]).sum(axis=1)
    return jnp.pad(sums, ((0, -sums.shape[0] % _COUNTS), (0, 0)))
