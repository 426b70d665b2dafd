"""A thread block's walk over the tiles of a grouped product (``mosaic_gpu``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.fp4 import Fp4Product
from kernels_pallas.grouped_matmul.layout import ALIGNMENT
from kernels_pallas.grouped_matmul.tile import COMPUTE, FP4_SCALES, FP4_SCALES_TERMS, ProductSizes
from kernels_pallas.mosaic import WGMMA, WGMMA_ROW, WGMMA_ROWS, Ref, load, per_row, store
from kernels_pallas.quantised import BLOCK, FP8_MAX, TINY
from kernels_pallas.rms_norm.mosaic_gpu import ROW, WARPS, write

TilePlace = tuple[jax.Array, jax.Array, jax.Array]  # row tile, column tile, part of K
# Sums, one per product; and the scales of the next step's rows and weights.
_Sums = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


@dataclass(frozen=True)
class Walk:
    """A thread block's walk over its tiles: the work of the loader and of the computing warpgroups.

    Attributes:
        row_tiles: the number of tiles of rows; read where it is needed, as registers are scarce.
        half: number of the thread block among the two that have a tile together.
        out: the results, one of each weight; of a gated product in e4m3, values and scales.
        parts: the parts of a gated product's sums, where the thread blocks of a cluster have one each.
        interpreted: whether Pallas interprets the kernel.
    """

    sizes: ProductSizes
    operands: tuple[Any, ...]
    table: Ref
    row_tiles: Ref
    half: jax.Array | int
    out: tuple[Ref, ...]
    parts: tuple[Ref, ...]
    scratch: dict[str, Ref]
    interpreted: bool

    def place(self, i: jax.Array) -> TilePlace:
        """The place of the i-th tile of all walks: band by band, column by column."""
        splits, columns, band = self.sizes.tile.splits, self.sizes.column_tiles, self.sizes.band
        tile, part = lax.div(i, splits), lax.rem(i, splits)
        before = lax.div(tile, band * columns) * band
        inside, height = lax.rem(tile, band * columns), jnp.minimum(self.row_tiles[0] - before, band)
        return before + lax.rem(inside, height), lax.div(inside, height), part

    def share(self, wg: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """First row and first column of a computing warpgroup within its thread block's rows of a tile."""
        return (0, wg * self.sizes.width) if self.sizes.tile.rows == WGMMA_ROWS else (wg * WGMMA_ROWS, 0)

    def rows_of(self, wg: jax.Array) -> jax.Array | int:
        """First row of a computing warpgroup within a tile."""
        if self.sizes.tile.pair > 1:
            return (self.half * COMPUTE + wg) * WGMMA_ROWS
        return self.share(wg)[0]

    def of_weight(self, column_tile: jax.Array, do: Callable[[int, jax.Array], None]) -> None:
        """Call ``do`` with the number of a column tile's weight, and that of the tile in it."""
        edges = self.sizes.edges
        if len(edges) == 1:
            do(0, column_tile)
        for n, (first, end) in enumerate(pairwise(edges)):
            inside = jnp.logical_and(column_tile >= first, column_tile < end)
            pl.when(inside)(partial(do, n, column_tile - first))

    def load(self, walker: jax.Array, mine: jax.Array) -> None:
        """Fill the ring with the operands of every step of every tile."""
        sizes, tile, s = self.sizes, self.sizes.tile, self.scratch
        both = "half" if tile.pair > 1 else None

        def one_tile(i: jax.Array, _: None) -> None:
            row_tile, column_tile, part = self.place(walker + i * sizes.walkers)
            group, first = self.table[0, row_tile], 0
            if sizes.ending.slots is None:
                first = pl.multiple_of(self.table[1, row_tile], ALIGNMENT)

            def step(k: jax.Array, _: None) -> None:
                filled = i * sizes.steps + k
                slot = lax.rem(filled, tile.stages)
                full, at = s["full"].at[slot], part * sizes.steps + k
                terms = pl.ds(at * sizes.stage_terms, sizes.stage_terms)
                pl.when(filled >= tile.stages)(lambda: self.await_free(slot))
                self.load_rows(first, self.table[2, row_tile], terms, slot)

                def weights(n: int, column_tile: jax.Array) -> None:
                    columns = pl.ds(column_tile * tile.columns, tile.columns)
                    for b in range(sizes.blocks):
                        for w, to, terms in self.weights(n, at):
                            of_block = w.at[group, b, columns, terms]
                            plgpu.copy_gmem_to_smem(of_block, to.at[slot, b], full, collective_axes=both)

                self.of_weight(column_tile, weights)

            lax.fori_loop(0, sizes.steps, step, None)

        def drain(filled: jax.Array, _: None) -> None:
            plgpu.barrier_wait(s["free"].at[lax.rem(filled, tile.stages)])

        lax.fori_loop(0, mine, one_tile, None)
        # No warpgroup may leave while another still arrives at a barrier.
        lax.fori_loop(jnp.maximum(mine * sizes.steps - tile.stages, 0), mine * sizes.steps, drain, None)

    def load_rows(self, first: jax.Array | int, height: jax.Array, terms: Any, slot: jax.Array) -> None:
        """Copy some terms of a tile's rows, from row number ``first``, to a stage.

        Beside FP4 weights 64 rows are half of the bytes; results of rows that are not there are never read.
        """
        sizes, rows = self.sizes, self.sizes.block_rows
        x, xs, full = self.operands[0], self.scratch["xs"].at[slot], self.scratch["full"].at[slot]

        def copy(count: int) -> None:
            given = pl.ds(first + self.half * rows, count)
            plgpu.copy_gmem_to_smem(x.at[given, terms], xs.at[pl.ds(0, count)] if count < rows else xs, full)

        if sizes.fp4:
            few = height <= ALIGNMENT
            pl.when(few)(lambda: copy(ALIGNMENT))
            pl.when(jnp.logical_not(few))(lambda: copy(rows))
        else:
            copy(rows)

    def weights(self, n: int, at: jax.Array) -> tuple[tuple[Ref, Ref, Any], ...]:
        """Arrays of weight number n, the rings for them, and the part of a row that K's stage ``at`` has."""
        s, width = self.scratch, self.sizes.stage_terms
        if not self.sizes.fp4:
            return ((self.operands[1][n], s["ws"], pl.ds(at * width, width)),)
        scales = pl.ds(lax.div(at * width, FP4_SCALES_TERMS) * FP4_SCALES, FP4_SCALES)
        codes = pl.ds(at * (width // 2), width // 2)
        return (self.operands[1][n], s["codes"], codes), (self.operands[2], s["exponents"], scales)

    def await_free(self, slot: jax.Array) -> None:
        """Wait until a stage may be filled; a copy of shared weights fills it in both thread blocks."""
        plgpu.barrier_wait(self.scratch["free"].at[slot])
        if self.sizes.tile.pair > 1:
            plgpu.barrier_arrive(self.scratch["both_free"].at[slot])
            plgpu.barrier_wait(self.scratch["both_free"].at[slot])

    def compute(self, wg: jax.Array, walker: jax.Array, mine: jax.Array) -> None:
        """Multiply, finish and store every tile."""

        def one_tile(i: jax.Array, _: None) -> None:
            place = self.place(walker + i * self.sizes.walkers)
            sizes = self.sizes
            way = self.scaled_sums if sizes.fp8 else self.expanded_sums if sizes.fp4 else self.plain_sums
            sums = way(wg, i, place)
            if self.sizes.cluster > 1:
                self.sum_parts(wg, place, sums)
            elif not self.sizes.gated:
                split = self.sizes.tile.splits > 1
                outs = [out.at[place[2]] if split else out for out in self.out]
                self.store(wg, place, sums[0], outs)
            elif self.sizes.fp8:
                self.store_quantised(wg, i, place, self.swiglu(*sums))
            else:
                self.store(wg, place, self.swiglu(*sums), self.out)

        lax.fori_loop(0, mine, one_tile, None)
        plgpu.wait_smem_to_gmem(0)

    def scaled_sums(self, wg: jax.Array, i: jax.Array, place: TilePlace) -> tuple[jax.Array, ...]:
        """Sum the products of FP8 blocks along the inner dimension, each times its blocks' scales."""
        sizes, s = self.sizes, self.scratch
        x_scale = self.operands[2]
        row_tile, column_tile, part = place
        column = self.share(wg)[1]
        of_tile = row_tile * sizes.tile.rows if sizes.ending.slots is None else 0
        rows = pl.ds(of_tile + self.rows_of(wg), WGMMA_ROWS)
        group = self.table[0, row_tile]
        blocks = [(group, b) for b in range(sizes.blocks)]

        def scales(k: jax.Array | int) -> tuple[jax.Array, ...]:
            depth = part * sizes.steps + k
            of_weights = (self.weight_scale(block, column_tile, column, depth) for block in blocks)
            return load(x_scale, (depth, rows), WGMMA_ROW), *of_weights

        def step(k: jax.Array, carry: _Sums) -> _Sums:
            sums, (of_rows, *of_weights) = carry
            slot = lax.rem(i * sizes.steps + k, sizes.tile.stages)
            ahead = scales(jnp.minimum(k + 1, sizes.steps - 1))  # loaded during a step
            plgpu.barrier_wait(s["full"].at[slot])
            new = []
            for together in self.together:
                products = self.products(slot, together, wg)
                if together[-1] == sizes.blocks - 1:
                    plgpu.barrier_arrive(s["free"].at[slot])
                new += [
                    sums[b] + product * per_row(of_rows * of_weights[b], sizes.width)
                    for b, product in zip(together, products, strict=True)
                ]
            return tuple(new), ahead

        zero = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, sizes.width), jnp.float32), WGMMA)
        return lax.fori_loop(0, sizes.steps, step, ((zero,) * sizes.blocks, scales(0)))[0]

    def weight_scale(
        self,
        matrix: tuple[jax.Array, int],
        column_tile: jax.Array,
        column: jax.Array | int,
        depth: jax.Array | int,
    ) -> jax.Array:
        """Scale of a block of weights.

        matrix: group and number of the product. column: first within the tile. depth: block along K.
        """
        w_scales, columns, found = self.operands[3], self.sizes.tile.columns, None
        for w_scale, first in zip(w_scales, self.sizes.edges, strict=False):
            block = lax.div((column_tile - first) * columns + column, BLOCK)
            if len(w_scales) > 1:  # scales of the other weights are read, but do not count
                block = jnp.clip(block, 0, w_scale.shape[2] - 1)
            own = w_scale[*matrix, block, depth]
            found = own if found is None else jnp.where(column_tile >= first, own, found)
        assert found is not None
        return found

    def plain_sums(self, wg: jax.Array, i: jax.Array, place: TilePlace) -> tuple[jax.Array, ...]:
        """The bfloat16 product: sums over K, kept by the tensor cores."""
        del place  # needed for scales only
        sizes, s = self.sizes, self.scratch

        def over_k(*accs: Ref) -> tuple[jax.Array, ...]:
            def step(k: jax.Array, _: None) -> None:
                slot = lax.rem(i * sizes.steps + k, sizes.tile.stages)
                plgpu.barrier_wait(s["full"].at[slot])
                for b, acc in enumerate(accs):
                    self.multiply(acc, slot, b, wg)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(s["free"].at[slot])

            lax.fori_loop(0, sizes.steps, step, None)
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(
            over_k, *[plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, sizes.width), jnp.float32)] * sizes.blocks
        )

    def expanded_sums(self, wg: jax.Array, i: jax.Array, place: TilePlace) -> tuple[jax.Array, ...]:
        """The bfloat16 product with FP4 weights, which the warpgroup expands."""
        product = Fp4Product(self.sizes, self.scratch, self.interpreted)
        return product.sums(wg, self.share(wg)[1], i * self.sizes.steps, place[2] * self.sizes.steps)

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The products of a stage in groups that run side by side: registers hold one group's results."""
        blocks = tuple(range(self.sizes.blocks))
        return (blocks,) if self.sizes.tile.rows == WGMMA_ROWS else tuple((b,) for b in blocks)

    def products(self, slot: jax.Array, which: tuple[int, ...], wg: jax.Array) -> tuple[jax.Array, ...]:
        """Some products of one stage alone."""

        def alone(*accs: Ref) -> tuple[jax.Array, ...]:
            for b, acc in zip(which, accs, strict=True):
                self.multiply(acc, slot, b, wg)
            plgpu.wgmma_wait(0)
            return tuple(acc[...] for acc in accs)

        shape = (WGMMA_ROWS, self.sizes.width)
        return pl.run_scoped(alone, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(which))

    def multiply(self, acc: Ref, slot: jax.Array, b: int, wg: jax.Array) -> None:
        """Add one stage's product to an accumulator of the tensor cores; does not wait for it."""
        row, column = self.share(wg)
        x = self.scratch["xs"].at[slot, pl.ds(row, WGMMA_ROWS)]
        w = self.scratch["ws"].at[slot, b, pl.ds(column, self.sizes.width)]
        plgpu.wgmma(acc, x, w.T)

    def store(self, wg: jax.Array, place: TilePlace, value: jax.Array, outs: Sequence[Ref]) -> None:
        """Write a warpgroup's share of a tile through shared memory, without rows past the tile's end.

        outs: the results, one of each weight.
        """
        tile, staged = self.sizes.tile, self.scratch["staged"]
        row_tile, column_tile, _ = place
        row, column = self.rows_of(wg), self.share(wg)[1]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        staged[wg] = value.astype(staged.dtype)
        plgpu.commit_smem()
        first = pl.multiple_of(self.table[1, row_tile] + row, ALIGNMENT)
        height = self.table[2, row_tile] - row

        # A copy's box must not be larger than its array.
        most = min(self.sizes.ending.slots or WGMMA_ROWS, WGMMA_ROWS)

        def copy(n: int, column_tile: jax.Array) -> None:
            columns = pl.ds(column_tile * tile.columns + column, self.sizes.width)

            @pl.when(height >= WGMMA_ROWS)
            def _whole() -> None:
                if most == WGMMA_ROWS:
                    plgpu.copy_smem_to_gmem(staged.at[wg], outs[n].at[pl.ds(first, WGMMA_ROWS), columns])

            for piece in range(0, min(most, WGMMA_ROWS - ALIGNMENT), ALIGNMENT):

                @pl.when(jnp.logical_and(height > piece, height < WGMMA_ROWS))
                def _piece(piece: int = piece) -> None:
                    rows = pl.ds(pl.multiple_of(first + piece, ALIGNMENT), ALIGNMENT)
                    plgpu.copy_smem_to_gmem(staged.at[wg, pl.ds(piece, ALIGNMENT)], outs[n].at[rows, columns])

        self.of_weight(column_tile, copy)

    def store_quantised(self, wg: jax.Array, i: jax.Array, place: TilePlace, value: jax.Array) -> None:
        """Write a tile as e4m3, with a scale for each row of its 128 columns."""
        tile, s = self.sizes.tile, self.scratch
        row_tile, column_tile, _ = place
        peak = jnp.max(jnp.abs(value), axis=1)
        if tile.rows == WGMMA_ROWS:  # the other warpgroup has the other half of each row
            turn = lax.rem(i, 2)  # a warpgroup may be one tile ahead, never two
            s["peaks"][turn, wg] = peak
            plgpu.barrier_arrive(s["met"])
            plgpu.barrier_wait(s["met"])
            peak = jnp.maximum(peak, plgpu.layout_cast(s["peaks"][turn, 1 - wg], WGMMA_ROW))
        scale = jnp.maximum(peak, TINY) * (1 / FP8_MAX)
        self.store(wg, place, value * per_row(1 / scale, self.sizes.width), self.out)
        # Through shared memory as well, as an address per thread would exceed the registers.
        s["scales"][wg] = scale
        plgpu.commit_smem()

        @pl.when(jnp.logical_or(wg == 0, tile.rows != WGMMA_ROWS))
        def _scales() -> None:
            rows = pl.ds(row_tile * tile.rows + self.rows_of(wg), WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(s["scales"].at[wg], self.out[1].at[column_tile, rows])

    def sum_parts(self, wg: jax.Array, place: TilePlace, sums: tuple[jax.Array, ...]) -> None:
        """Write a part of K, wait for the cluster's other parts, and finish a share of the tile's rows.

        A warp finishes a row. A piece of 8 rows is finished by one thread block of the cluster.
        """
        tile = self.sizes.tile
        row_tile, column_tile, part = place
        for b, value in enumerate(sums):
            self.store(wg, place, value, [self.parts[0].at[part, b]])
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.scratch["summed"])
        plgpu.barrier_wait(self.scratch["summed"])
        first, height = self.table[1, row_tile], self.table[2, row_tile]
        columns = pl.ds(column_tile * BLOCK, BLOCK)
        pieces = lax.div(height + (ALIGNMENT - 1), ALIGNMENT)

        def finish(i: jax.Array, _: None) -> None:
            row = (part + i * tile.splits) * ALIGNMENT + wg * WARPS
            rows = pl.ds(first + row, WARPS)
            gate, up = (
                reduce(jnp.add, (load(self.parts[0], (s, b, rows, columns), ROW) for s in range(tile.splits)))
                for b in range(self.sizes.blocks)
            )
            value, out = self.swiglu(gate, up), self.out[0].at[rows, columns]
            if self.sizes.fp8:
                write(value, out, self.out[1].at[column_tile, pl.ds(row_tile * tile.rows + row, WARPS)])
            else:
                store(out, value.astype(out.dtype))

        lax.fori_loop(0, lax.div(pieces - part + (tile.splits - 1), tile.splits), finish, None)

    def swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The activation of a gated product, within its limit."""
        limit = self.sizes.ending.limit
        if limit is not None:
            gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
        return gate / (1 + jnp.exp(-gate)) * up
