"""Sources of the rows that attention is over, on one device. Kinds of attention read them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from mtp_jax.model import indexer
from mtp_jax.model.cache import LayerCache, PagedView, read_chosen, read_index, read_rows
from mtp_jax.model.config import RowFormat
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.mla import Form
from mtp_jax.model.spec import Tree


class Blocks(NamedTuple):
    """The rows of a source in order, block by block.

    Attributes:
        read: rows and mask of block i, as ``read`` of the source gives them.
        size: number of rows of a block.
        count: number of blocks up to the last row that some token sees; the int 1 where one block is all.
    """

    read: Callable[[Int[Array, ""] | int], tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]]
    size: int
    count: Int[Array, ""] | int


@struct.dataclass
class Whole:
    """A source of rows at hand, without a cache.

    Attributes:
        rows: rows of whole sequences, with the fields of ``Entries``.
        mask: the rows that each token sees.
        index: index keys, of a layer with an indexer.
        form: MLA form of attention over them.
    """

    rows: Float[Array, "B L c"]
    mask: Bool[Array, "B W L"]
    index: Float[Array, "B L i"] | None = None
    form: Form = struct.field(pytree_node=False, default="naive")

    @property
    def length(self) -> int:
        """Rows of a sequence."""
        return self.rows.shape[1]

    def read(self, dtype: Any) -> tuple[Float[Array, "B L c"], Bool[Array, "B W L"]]:
        """The rows and the mask."""
        return self.rows, self.mask

    def scores(self, q: IndexQueries) -> Float[Array, "B W L"]:
        """The indexer's scores, float32; -inf where a token does not see a row."""
        assert self.index is not None, "a layer without an indexer has no index keys"
        return indexer.masked(indexer.scores(q, self.index), self.mask)

    def of(self, chosen: Int[Array, "B W K"] | None) -> "Whole":
        """The rows that tokens chose; None: all that they see."""
        if chosen is None:
            return self
        return replace(self, mask=self.mask & indexer.chosen_mask(chosen, self.length))


@struct.dataclass
class Paged:
    """A source of cached rows: the rows that a view sees.

    Attributes:
        only: the rows that each token chose; None: all rows that it sees.
        row: a row's format.
    """

    cache: LayerCache
    view: PagedView
    row: RowFormat = struct.field(pytree_node=False)
    only: Bool[Array, "B W L"] | None = None

    @property
    def form(self) -> Form:
        """The MLA form of attention over them."""
        return self.view.form

    @property
    def length(self) -> int:
        """Rows of the view's pages."""
        return self.view.page_table.shape[1] * self.cache.page_size

    @property
    def width(self) -> int:
        """Tokens of a window."""
        return self.view.written.shape[1]

    def read(self, dtype: Any) -> tuple[Float[Array, "B L c"], Bool[Array, "B W L"]]:
        """All rows, FP8 rows in ``dtype``, and the mask. Rows that no token sees are zeros."""
        seen = self.view.visible.seen(self.length)
        rows = read_rows(self.cache, self.view.page_table, seen, dtype, self.row.e4m3, self.row.block)
        mask = self.view.visible.mask(self.width, self.length)
        return rows, mask if self.only is None else mask & self.only

    def blocks(self, rows: int, dtype: Any) -> Blocks:
        """The parts of ``read``: blocks of whole pages, of ``rows`` rows at most, but of a page at least."""
        view, page, width, length = self.view, self.cache.page_size, self.width, self.length
        columns = view.page_table.shape[1]
        each = min(max(rows // page, 1), columns)
        size = each * page
        table = jnp.pad(view.page_table, ((0, 0), (0, -columns % each)))
        chosen = self.only
        only = None if chosen is None else jnp.pad(chosen, ((0, 0), (0, 0), (0, -columns % each * page)))

        def read(i: Int[Array, ""] | int) -> tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]:
            pages, start = jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1), i * size
            # A window deeper than its slot's depth goes past the table, never into the last block's padding.
            inside = start + jnp.arange(size) < length
            seen, mask = view.visible.seen(size, start), view.visible.mask(width, size, start)
            if only is not None:
                mask &= jax.lax.dynamic_slice_in_dim(only, start, size, axis=2)
            found = read_rows(self.cache, pages, seen & inside, dtype, self.row.e4m3, self.row.block)
            return found, mask & inside

        if columns == each:
            return Blocks(read, size, 1)
        last = jnp.minimum(jnp.max(view.visible.end()), length)
        return Blocks(read, size, -(-last // size))

    def scores(self, q: IndexQueries) -> Float[Array, "B W L"]:
        """The indexer's scores, float32; -inf where a token does not see a row."""
        visible, last = self.view.visible, jnp.minimum(jnp.max(self.view.visible.end()), self.length)
        mask = visible.mask(self.width, self.length)
        return scores_of_pages(q, self.cache, self.view.page_table, mask, last)

    def of(self, chosen: Int[Array, "B W K"] | None) -> "Paged | Chosen":
        """The rows that tokens chose; None: all that they see.

        They are read one by one if the rows of all tokens are fewer than the rows of the pages.
        """
        if chosen is None:
            return self
        if chosen.shape[1] * chosen.shape[2] <= self.length:
            return Chosen(self.cache, self.view, self.row, chosen)
        return replace(self, only=indexer.chosen_mask(chosen, self.length))


def scores_of_pages(
    q: IndexQueries,
    cache: LayerCache,
    table: Int[Array, "B n"],
    visible: Bool[Array, "B W L"],
    last: Int[Array, ""],
) -> Float[Array, "B W L"]:
    """The indexer's scores of cached rows, float32; -inf where a token does not see one.

    Only blocks of index keys before row ``last``, which no token sees, are scored.
    """
    page, length = cache.page_size, visible.shape[-1]
    each = min(indexer.block_size(length, q.weights.shape[2], page) // page, table.shape[1])
    padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % each)))

    def read(i: Int[Array, ""] | int) -> Float[Array, "B l i"]:
        return read_index(cache, jax.lax.dynamic_slice_in_dim(padded, i * each, each, axis=1), q.q.dtype)

    found = indexer.scores_in_blocks(q, read, each * page, length, -(-last // (each * page)))
    return indexer.masked(found, visible)


@struct.dataclass
class Chosen:
    """A source of chosen rows, read one by one: every token becomes a slot with rows of its own.

    Attributes:
        row: a row's format.
        chosen: numbers of rows, or NOTHING, which comes first.
    """

    cache: LayerCache
    view: PagedView
    row: RowFormat = struct.field(pytree_node=False)
    chosen: Int[Array, "B W K"]

    def read(self, dtype: Any) -> Whole:
        """The rows of every token, for absorbed attention: FP8 rows in ``dtype``, zeros for NOTHING."""
        rows = read_chosen(self.cache, self.view.page_table, self.chosen, dtype, self.row.e4m3)
        there = self.chosen != indexer.NOTHING
        return Whole(_alone(rows)[:, 0], _alone(there), form="absorbed")

    def apart(self, q: Tree) -> Tree:
        """Queries of every token as of a slot with a window of one token, [B * W, 1, ...]."""
        return jax.tree.map(_alone, q)

    def together(self, context: Float[Array, "T one N v"]) -> Float[Array, "B W N v"]:
        """Undoes ``apart``."""
        return context.reshape(*self.chosen.shape[:2], *context.shape[2:])


Source = Whole | Paged | Chosen


def _alone(x: Shaped[Array, "B W ..."]) -> Shaped[Array, "T one ..."]:
    return x.reshape(-1, 1, *x.shape[2:])
