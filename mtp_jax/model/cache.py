"""Rows of the paged latent cache: where they are, writing and reading them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16

from mtp_jax.model.device import platform


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Rows:
    """Rows whose latents are e4m3, or pages of them (see ops.packed).

    Attributes:
        words: latents in pairs and the bfloat16 rope key, uint16 [..., C / 2 + R].
        scales: of each 128 latents, float32 [..., ceil(C / 128)].
    """

    words: UInt16[Array, "*b w"]
    scales: Float[Array, "*b s"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the words; pages and rows come first, as in a cache of plain rows."""
        return self.words.shape


# A layer's cache: rows [latent | rope key], or FP8 rows.
Pages = Float[Array, "P S c"] | Fp8Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedView:
    """Where one pass reads and writes in the cache. Page numbers are local to a slot's data shard.

    Attributes:
        page_table: pages of each slot in order, int32 [B, n]; the last page of all where there is none.
        positions: row that each window token is written to, int32 [B, W]; negative rows are not written.
        mask: rows each window token attends to, bool [B, W, n * S].
    """

    page_table: Int[Array, "B n"]
    positions: Int[Array, "B W"]
    mask: Bool[Array, "B W L"]


def write_rows(
    pages: Pages,
    rows: Float[Array, "B W c"] | Fp8Rows,
    page_table: Int[Array, "B n"],
    positions: Int[Array, "B W"],
) -> Pages:
    """``pages`` with the window's rows written at ``positions``; in place when donated.

    Rows that are not to be written (negative positions) go to the last page, which no sequence owns; so do
    rows past the table, which an executable deeper than its slots ask for has.
    """
    count, size, _ = pages.shape
    columns = page_table.shape[1]
    written = (positions >= 0) & (positions < columns * size)
    column = jnp.clip(positions // size, 0, columns - 1)
    page = jnp.where(written, jnp.take_along_axis(page_table, column, axis=1), count - 1).reshape(-1)
    offset = (positions % size).reshape(-1)

    def scatter(pages: Array, rows: Array) -> Array:
        rows = rows.reshape(-1, rows.shape[-1])
        return pages.at[page, offset].set(rows, mode="promise_in_bounds")

    if platform() != "cpu":
        return jax.tree.map(scatter, pages, rows)

    # A scatter checks its bounds by a select, for which XLA on a CPU copies the whole cache several times.
    def write(i: Int[Array, ""], pages: Pages) -> Pages:
        def put(pages: Array, rows: Array) -> Array:
            row = rows.reshape(-1, 1, 1, rows.shape[-1])[i]
            return jax.lax.dynamic_update_slice(pages, row, (page[i], offset[i], 0))

        return jax.tree.map(put, pages, rows)

    # A loop of a length XLA cannot know is not unrolled and fused into the cache's readers, with copies.
    last = jnp.max(jnp.where(written.reshape(-1), jnp.arange(1, len(page) + 1), 0))
    return jax.lax.fori_loop(0, last, write, pages)


def read_rows(pages: Pages, view: PagedView) -> Float[Array, "B L c"] | Fp8Rows:
    """Every row of each slot's pages, zero where no window token may see it.

    Rows past the committed length hold garbage, NaN perhaps: a zero probability would not silence it.
    """
    seen = view.mask.any(axis=1)[..., None]

    def read(pages: Array) -> Array:
        rows = pages[view.page_table]
        return jnp.where(seen, rows.reshape(rows.shape[0], -1, rows.shape[-1]), 0)

    return jax.tree.map(read, pages)
