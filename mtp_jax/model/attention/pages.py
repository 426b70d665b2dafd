"""Two ways to write rows into a layer's pages on one device, with equal results: a scatter and a loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.model.cache import places
from mtp_jax.model.spec import Tree

Write = Callable[[Any, Any, Int[Array, "B n"], Int[Array, "B W"]], Any]
"""A function with the signature of ``by_scatter``."""


def by_scatter(pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]) -> Tree:
    """A tree of ``pages`` [P, S, c] with the rows [B, W, c] written; in place when donated.

    Rows with a negative number in ``written`` are dropped. Rows past the page table are dropped, too; they
    occur where a program is deeper than its slots' depth. In one place of a spare page these rows would wait
    for others, as a GPU writes bfloat16 by atomic operations.
    """
    count, size = jax.tree.leaves(pages)[0].shape[:2]
    page, offset, inside = places(count, size, page_table, written)
    page = jnp.where(inside, page, count)

    def scatter(pages: Array, rows: Array) -> Array:
        return pages.at[page, offset].set(rows.reshape(-1, rows.shape[-1]), mode="drop")

    return jax.tree.map(scatter, pages, rows)


def by_loop(pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]) -> Tree:
    """``by_scatter`` in a form that is fast on a CPU (docs/cpu.md); the last page may differ.

    A scatter checks its bounds by a select, for which XLA copies the whole cache. A row's place is found in
    the loop, by the kernel that writes it.
    """
    (count, size), width = jax.tree.leaves(pages)[0].shape[:2], written.shape[1]
    columns = page_table.shape[1]

    def write(i: Int[Array, ""] | int, pages: Tree) -> Tree:
        def own(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, i, 1, allow_negative_indices=False)

        slot = jax.lax.dynamic_slice_in_dim(page_table, i // width, 1, allow_negative_indices=False)
        page, offset, _ = places(count, size, slot, own(written.reshape(-1, 1)))

        def put(pages: Array, rows: Array) -> Array:
            row = own(rows.reshape(-1, 1, rows.shape[-1]))
            return jax.lax.dynamic_update_slice(
                pages, row, (page[0], offset[0], 0), allow_negative_indices=False
            )

        return jax.tree.map(put, pages, rows)

    # XLA would unroll a loop of known length and fuse it into the cache's readers, with copies.
    inside = (written >= 0) & (written < columns * size)
    last = jnp.max(jnp.where(inside.reshape(-1), jnp.arange(1, written.size + 1), 0))
    return jax.lax.fori_loop(0, last, write, pages)
