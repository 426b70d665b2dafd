"""The layout of few tokens' rows by expert, in the thread block that chose the experts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.layout import ALIGNMENT, all_tiles, slots
from kernels_pallas.mosaic import (
    LINE,
    LINE_OF,
    LINES_OF,
    WGMMA_ROWS,
    Layout,
    Ref,
    Warpgroup,
    load,
    per_column,
    per_row,
    store,
)

# No expert, after all experts.
_NONE = 1 << 30


@dataclass(frozen=True)
class Laying:
    """Sizes of a layout by ``grouped_matmul.layout.group_all``.

    Attributes:
        tokens: number of tokens.
        rows: number of rows of the thread block, ``tokens`` and padding.
        chosen: number of experts of each token.
        experts: number of experts that are laid out.
    """

    tokens: int
    rows: int
    chosen: int
    experts: int

    @property
    def pairs(self) -> int:
        """Pairs of a rank and a row, in whole lines."""
        return -(-self.rows * self.chosen // LINE) * LINE

    def out_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of places, table and count."""
        tiles = all_tiles(self.tokens * self.chosen, self.experts)
        shapes = (self.pairs,), (3, tiles), (tiles,)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)

    def scratch(self) -> dict[str, pl.MemoryRef]:
        """Shared memory: each pair's expert, the expert again where the pair is its first, and its number."""
        return {name: plgpu.SMEM((self.pairs,), jnp.int32) for name in ("ids", "fresh", "numbers")}

    def write(
        self, wg: Warpgroup, ids: list[jax.Array], row: Layout, out: tuple[Ref, ...], scratch: dict[str, Ref]
    ) -> None:
        """Write places, table and count.

        ids: experts that the rows chose, rank by rank, numbered from the first that is laid out.
        """
        place, table, count = out
        pairs, whole, tiles = self.pairs, pl.ds(0, self.pairs), table.shape[1]
        each = LINES_OF.reduce(1)
        line, lane = (wg.iota_of((pairs, pairs), axis, LINES_OF) for axis in range(2))
        at = wg.iota_of((pairs,), 0, each)

        def by_line(x: jax.Array) -> jax.Array:
            return wg.laid_out(per_row(x, pairs), LINES_OF)

        def by_lane(ref: Ref, lines: int = pairs) -> jax.Array:
            return wg.laid_out(per_column(load(ref, (whole,), LINE_OF), lines), LINES_OF)

        def total(mask: jax.Array, x: jax.Array | int = 1) -> jax.Array:
            """Sum of each line where the mask is set."""
            return wg.laid_out(jnp.sum(wg.laid_out(jnp.where(mask, x, 0), LINES_OF), axis=1), each)

        for j, x in enumerate(ids):
            scratch["ids"][pl.ds(j * self.rows, self.rows)] = x
        for j in range(self.chosen, pairs // self.rows):
            scratch["ids"][pl.ds(j * self.rows, self.rows)] = wg.laid_out(jnp.full_like(ids[0], _NONE), row)
        plgpu.commit_smem()
        own = load(scratch["ids"], (whole,), each)
        again = jnp.logical_and(by_lane(scratch["ids"]) == by_line(own), lane < line)
        here = jnp.logical_and(own >= 0, own < self.experts)
        first = jnp.logical_and(here, total(again) == 0)
        scratch["fresh"][whole] = wg.laid_out(jnp.where(first, own, _NONE), each)
        plgpu.commit_smem()
        number = total(by_lane(scratch["fresh"]) < by_line(own))
        scratch["numbers"][whole] = wg.laid_out(jnp.where(first, number, -1), each)
        slot = number * ALIGNMENT + (at & (self.rows - 1))
        nowhere = slots(self.tokens * self.chosen, self.experts, WGMMA_ROWS)
        store(place.at[whole], wg.laid_out(jnp.where(here, slot, nowhere), each))
        plgpu.commit_smem()
        tile, of = wg.iota_of((tiles,), 0, each), wg.iota_of((tiles, pairs), 0, LINES_OF)
        fresh = by_lane(scratch["fresh"], tiles)
        held = total(fresh < _NONE)
        store(count.at[pl.ds(0, tiles)], held)
        store(table.at[0, pl.ds(0, tiles)], total(by_lane(scratch["numbers"], tiles) == of, fresh))
        store(table.at[1, pl.ds(0, tiles)], tile * ALIGNMENT)
        store(table.at[2, pl.ds(0, tiles)], wg.laid_out(jnp.where(tile < held, ALIGNMENT, 0), each))
