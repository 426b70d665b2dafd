"""A layer's cache, paged or whole: its contents, and the places where a pass reads and writes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.index_scores import index_rows
from kernels_pallas.mla_decode.fp8_rows import BLOCK, PackedRows, pack, unpack
from mtp_jax.model.config import ModelConfig, RowFormat
from mtp_jax.model.indexer import NOTHING
from mtp_jax.model.mla import Form
from mtp_jax.model.parts import Packing
from mtp_jax.model.spec import Tree
from mtp_jax.model.visible import Visible


@struct.dataclass
class Entries:
    """Rows that tokens add to a layer's cache, before they are stored.

    Attributes:
        rows: [latent | rope key], [B, W, C + R]; or [keys | values], see ``ModelConfig.row``.
        index: index keys [B, W, i], of a layer with an indexer.
    """

    rows: Float[Array, "B W c"]
    index: Float[Array, "B W i"] | None = None


@struct.dataclass
class LayerCache:
    """One layer's pages; or rows in the form in which the pages hold them.

    Attributes:
        rows: [latent | rope key], [P, S, C + R]; or [keys | values]; or FP8 rows, two arrays (see
            `fp8_rows.pack`).
        index: index keys [P, S, i], of a layer with an indexer; or two arrays (see `index_rows.pack`).
    """

    rows: Float[Array, "*b c"] | PackedRows
    index: Float[Array, "*b i"] | PackedRows | None = None

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return jax.tree.leaves(self.rows)[0].shape[1]

    @property
    def fp8(self) -> bool:
        """Whether it is an FP8 cache."""
        return isinstance(self.rows, tuple)

    def stored(self, entries: Entries, row: RowFormat) -> "LayerCache":
        """Entries as this cache holds them."""
        rows, index = contained(entries.rows, row.keys), entries.index
        if not self.fp8:
            return LayerCache(rows, index)
        packed = pack(rows, row.e4m3, row.block)
        return LayerCache(packed, None if index is None else index_rows.pack(index))


@struct.dataclass
class WindowPages:
    """The part of a ``WindowCache`` in pages.

    Attributes:
        rows: each page has the rows of its last tokens, [P, n, c], or FP8 rows.
        inputs: likewise inputs of compressors, float32, where entries overlap; else None.
        entries: entries and their index keys, S / r of a page; None in a layer without.
    """

    rows: Float[Array, "P n c"] | PackedRows
    inputs: Float[Array, "P n f"] | None
    entries: LayerCache | None


@struct.dataclass
class WindowSlots:
    """The part of a ``WindowCache`` in slots: values of recent tokens, by position modulo R.

    Attributes:
        rows: [slots, R, c], or FP8 rows.
        inputs: compressors read them, [slots, R, F] float32; None in a layer without entries.
    """

    rows: Float[Array, "slots R c"] | PackedRows
    inputs: Float[Array, "slots R F"] | None


@struct.dataclass
class WindowCache:
    """The cache of a layer that attends to a window of tokens and, in some models, to compressed entries.

    An entry lies in the page of its last token, so that a page is whole. Roll-back is a length: an entry
    with a rejected token is made again before a token sees it, and so are values of recent tokens.
    """

    pages: WindowPages
    slots: WindowSlots
    page_size: int = struct.field(pytree_node=False)


def contained(rows: Float[Array, "*b c"], keys: tuple[int, int]) -> Float[Array, "*b c"]:
    """Rows as they are cached. A row that is not finite becomes NaN in its ``keys`` and zero elsewhere.

    Attention multiplies values by 0 in rows that a token does not see, and 0 x NaN is NaN. Values come from
    the part besides ``keys`` (in MLA the latent), so zeros there keep NaN from such tokens. Scores come from
    the keys, too (in MLA the rope key), and a select masks them: a token that sees the row gets NaN.
    """
    finite = jnp.isfinite(rows).all(axis=-1, keepdims=True)
    at = jnp.arange(rows.shape[-1])
    broken = jnp.where((at >= keys[0]) & (at < keys[1]), jnp.nan, 0).astype(rows.dtype)
    return jnp.where(finite, rows, broken)


def empty_cache(
    pages: int, page_size: int, cfg: ModelConfig, layer: int, dtype: Any, *, fp8: bool = False
) -> LayerCache:
    """Zeroed pages of a layer, for rows of all tokens; NextN layers count on from the trunk's.

    ``fp8`` ignores ``dtype``.
    """
    index = cfg.attention.index_width(layer) or None
    return zeroed(pages, page_size, cfg.row, index, None if fp8 else dtype)


def zeroed(pages: int, page_size: int, row: RowFormat, index: int | None, dtype: Any) -> LayerCache:
    """Zeroed pages of rows. index: width of index keys; None: there are none. dtype: None: FP8 rows."""
    rows = jnp.zeros((pages, page_size, row.width), jnp.float32 if dtype is None else dtype)
    keys = None if index is None else jnp.zeros((pages, page_size, index), rows.dtype)
    if dtype is not None:
        return LayerCache(rows, keys)
    packed = pack(rows, row.e4m3, row.block)
    return LayerCache(packed, None if keys is None else index_rows.pack(keys))


@struct.dataclass
class PagedView:
    """The places where one pass reads and writes in the cache. Page numbers are local to a slot's data shard.

    A token's position, which rotates queries and keys, is no part of the view: it may differ from its row.

    Attributes:
        page_table: pages of each slot in order, int32 [B, n]; the last page of all where there is none.
        written: row that each window token is written to, int32 [B, W]; negative rows are not written, and
            the results of their tokens are not used.
        visible: rows that each window token attends to.
        form: MLA form that attends: "absorbed" for windows of a few tokens. Other attention has one form.
        packing: window tokens that the pass computes; None: all.
        slot: number of each slot over all data shards, of a model whose caches have a part for each slot; a
            number past the last slot for a row that writes nothing.
        block: whether nothing is written, and every token with a row sees all tokens of the pass, too.
    """

    page_table: Int[Array, "B n"]
    written: Int[Array, "B W"]
    visible: Visible
    form: Form = struct.field(pytree_node=False, default="absorbed")
    packing: Packing | None = None
    slot: Int[Array, " B"] | None = None
    block: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the pass's rows: [B, W], or [S, R] where they are packed."""
        rows, width = (self.written if self.packing is None else self.packing.tokens).shape
        return rows, width

    def packed(self, windows: Tree) -> Tree:
        """The pass's rows of arrays [B, W, ...]."""
        return windows if self.packing is None else self.packing.packed(windows)

    def unpacked(self, rows: Tree) -> Tree:
        """Arrays [B, W, ...] of the pass's rows."""
        return rows if self.packing is None else self.packing.unpacked(rows)


Views = tuple[PagedView, ...]
"""The views of a pass, one for each of its parts (see ``parts``)."""


@struct.dataclass
class WholeCache:
    """One layer's rows of whole sequences, to which every pass appends its window's: for training.

    Attributes:
        rows: rows with the fields of ``Entries``, [B, L, c].
        mask: the rows, and their own window's, that the tokens of the next pass see.
    """

    rows: Float[Array, "B L c"]
    mask: Bool[Array, "#B W l"]

    def extended(self, rows: Float[Array, "B W c"]) -> "WholeCache":
        """The cache with the window's rows appended."""
        return WholeCache(jnp.concatenate([self.rows, rows], axis=1), self.mask)


Cache = LayerCache | WindowCache | WholeCache


def places(
    count: int, size: int, page_table: Int[Array, "B n"], written: Int[Array, "B W"]
) -> tuple[Int[Array, " r"], Int[Array, " r"], Bool[Array, " r"]]:
    """Page and offset of every row, and whether the row is written at all.

    count, size: number of pages, and of rows of each. A row that is not written gets the last page.
    """
    columns = page_table.shape[1]
    inside = (written >= 0) & (written < columns * size)
    column = jnp.clip(written // size, 0, columns - 1)
    page = jnp.where(inside, jnp.take_along_axis(page_table, column, axis=1), count - 1)
    return page.reshape(-1), (written % size).reshape(-1), inside.reshape(-1)


def rows_at(pages: Tree, page_table: Int[Array, "B n"], rows: Int[Array, "B W"]) -> Tree:
    """Gather rows of each slot by number, through its page table, from ``pages`` [P, S, c]: [B, W, c]."""
    count, size = jax.tree.leaves(pages)[0].shape[:2]
    page, offset, _ = places(count, size, page_table, rows)
    return jax.tree.map(lambda a: a[page, offset].reshape(*rows.shape, -1), pages)


def read_rows(
    cache: LayerCache,
    page_table: Int[Array, "B n"],
    seen: Bool[Array, "B L"],
    dtype: Any,
    rank: int,
    block: int = BLOCK,
) -> Float[Array, "B L c"]:
    """The rows of these pages, FP8 rows in ``dtype``; zero where no token sees them (``Visible.seen``).

    rank, block: ``e4m3`` and ``block`` of the format of FP8 rows.

    Rows past the committed length hold garbage, NaN perhaps: a zero probability would not silence it.
    """

    def read(pages: Array) -> Array:
        rows = pages[page_table]
        return jnp.where(seen[..., None], rows.reshape(rows.shape[0], -1, rows.shape[-1]), 0)

    found = jax.tree.map(read, cache.rows)
    return unpack(found, rank, block).astype(dtype) if isinstance(found, tuple) else found


def widened(rows: Float[Array, "*b c"] | PackedRows, row: RowFormat, dtype: Any) -> Float[Array, "*b c"]:
    """Rows as they are cached, FP8 rows in ``dtype``."""
    return unpack(rows, row.e4m3, row.block).astype(dtype) if isinstance(rows, tuple) else rows


def read_chosen(
    cache: LayerCache,
    page_table: Int[Array, "B n"],
    chosen: Int[Array, "B W K"],
    dtype: Any,
    rank: int,
    block: int = BLOCK,
) -> Float[Array, "B W K c"]:
    """The rows that each token chose, FP8 rows in ``dtype``; zero where it chose none.

    rank, block: see ``read_rows``.
    """
    there, size = chosen != NOTHING, cache.page_size
    row = jnp.where(there, chosen, 0)
    page = jnp.take_along_axis(page_table[:, None], row // size, axis=2)

    def read(pages: Array) -> Array:
        return jnp.where(there[..., None], pages[page, row % size], 0)

    found = jax.tree.map(read, cache.rows)
    return unpack(found, rank, block).astype(dtype) if isinstance(found, tuple) else found


def read_index(cache: LayerCache, page_table: Int[Array, "B n"], dtype: Any) -> Float[Array, "B L i"]:
    """The index keys of these pages, e4m3 keys in ``dtype``; keys past the committed length are garbage."""
    assert cache.index is not None, "a layer without an indexer has no index keys"

    def read(pages: Array) -> Array:
        rows = pages[page_table]
        return rows.reshape(rows.shape[0], -1, rows.shape[-1])

    found = jax.tree.map(read, cache.index)
    return index_rows.unpack(found).astype(dtype) if isinstance(found, tuple) else found
