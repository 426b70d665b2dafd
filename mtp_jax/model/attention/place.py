"""Places for entries, on one device: a place with entries in it is a source of the rows that tokens see."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from mtp_jax.model.attention.pages import Write
from mtp_jax.model.attention.source import Paged, Whole
from mtp_jax.model.cache import Entries, PagedView, WholeCache
from mtp_jax.model.config import RowFormat
from mtp_jax.model.mla import Form


@struct.dataclass
class PagedPlace:
    """A place in the pages of a cache, where a view says.

    Attributes:
        cache: a layer's cache that has pages.
        row: a row's format.
        write: writes rows into pages.
    """

    cache: Any
    view: PagedView
    row: RowFormat = struct.field(pytree_node=False)
    write: Write = struct.field(pytree_node=False)

    def filled(self, entries: Entries | None) -> tuple[Paged | Whole, Any]:
        """(The source with these entries, the cache); None: they have been written already."""
        if entries is None:
            return Paged(self.cache, self.view, self.row), self.cache
        if self.view.block:
            return self._beside(entries), self.cache
        with jax.named_scope("cache_write"):
            stored = self.cache.stored(entries, self.row)
            cache = self.write(self.cache, stored, self.view.page_table, self.view.written)
        return Paged(cache, self.view, self.row), cache

    def _beside(self, entries: Entries) -> Whole:
        """The cached rows that the view sees, and behind them the tokens of a block, which see each other."""
        own, view = entries.rows, self.view
        with jax.named_scope("attend"):
            cached, mask = Paged(self.cache, view, self.row).read(own.dtype)
            block = jnp.broadcast_to((view.written >= 0)[:, :, None], (*own.shape[:2], own.shape[1]))
            return Whole(jnp.concatenate([cached, own], axis=1), jnp.concatenate([mask, block], axis=2))


@struct.dataclass
class WholePlace:
    """A place for whole sequences, behind a cache's where there is one.

    Attributes:
        form: MLA form of attention over them.
    """

    cache: WholeCache | None
    form: Form = struct.field(pytree_node=False)

    def filled(self, entries: Entries) -> tuple[Whole, WholeCache | None]:
        """(The source with these entries, the cache)."""
        rows, cache = entries.rows, self.cache
        mask = jnp.tri(rows.shape[1], dtype=bool)[None]
        if cache is not None:
            cache = cache.extended(rows)
            rows, mask = cache.rows, cache.mask
        mask = jnp.broadcast_to(mask, (rows.shape[0], *mask.shape[1:]))
        return Whole(rows, mask, entries.index, self.form), cache


EntryPlace = PagedPlace | WholePlace
