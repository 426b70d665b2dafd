"""Values of recent tokens, in the place of all: attention over a window reads nothing else.

A slot has the values of its last tokens, by position modulo their number. A page has the values of its own
last tokens, with which a sequence goes on that begins with cached pages. A rejected token leaves values that
are overwritten before they are read, so that roll-back is a length.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, PyTree

from mtp_jax.model.attention.pages import Write, by_scatter
from mtp_jax.model.cache import rows_at
from mtp_jax.model.compressor import Span

RecentRows = PyTree
"""Values of tokens, [B, W, ...] each."""


@struct.dataclass
class Recent:
    """Values of recent tokens.

    Attributes:
        slots: each slot's, [slots, R, c].
        pages: the last n tokens of each page, [P, n, c], and the first channels alone where a next page
            reads no others; None where no page reads another one's.
        page_size: number of tokens of a page.
    """

    slots: RecentRows
    pages: RecentRows
    page_size: int = struct.field(pytree_node=False)

    @property
    def length(self) -> int:
        """R."""
        return jax.tree.leaves(self.slots)[0].shape[1]

    def before(self, span: Span, count: int, table: Int[Array, "B n"], slot: Int[Array, " B"]) -> RecentRows:
        """Values of the ``count`` tokens before a span, in or before whose page these all lie.

        Anything at places without a token, or in front of the last tokens of the page before.
        """
        at = span.start[:, None] - count + jnp.arange(count)
        found = jax.tree.map(lambda a: a.at[slot[:, None], at % self.length].get(mode="clip"), self.slots)
        if self.pages is None:
            return found
        first, kept = span.start[:, None] // self.page_size * self.page_size, self._kept
        number = at // self.page_size * kept + at % self.page_size - (self.page_size - kept)
        there = (at >= 0) & (at < first) & (at >= first - kept)
        last = rows_at(self.pages, table, jnp.where(there, number, -1))

        def either(new: Array, old: Array) -> Array:
            wide = jnp.pad(old, ((0, 0), (0, 0), (0, new.shape[-1] - old.shape[-1])))
            return jnp.where((at < first)[..., None], wide, new)

        return jax.tree.map(either, found, last)

    def extended(
        self, rows: RecentRows, span: Span, table: Int[Array, "B n"], slot: Int[Array, " B"], write: Write
    ) -> "Recent":
        """Add the values of a span's tokens."""
        index, size = jnp.arange(span.width), self.page_size
        at, there = span.start[:, None] + index, index < span.count[:, None]
        last = there & (index >= span.count[:, None] - self.length)
        place = jnp.where(last, at % self.length, -1)
        # Not by ``write``, which may write anything to the last place of all: slots have no spare one.
        slots = by_scatter(self.slots, rows, slot[:, None], place)
        if self.pages is None:
            return Recent(slots, None, size)
        offset = at % size - (size - self._kept)
        number = jnp.where(there & (offset >= 0), at // size * self._kept + offset, -1)
        own = jax.tree.map(lambda a, pages: a[..., : pages.shape[-1]], rows, self.pages)
        return Recent(slots, write(self.pages, own, table, number), size)

    @property
    def _kept(self) -> int:
        """n."""
        return jax.tree.leaves(self.pages)[0].shape[1]


def ring(pages: Any, slots: int, reach: int, widest: int) -> Any:
    """Zeroed values of each slot, of the channels and dtypes of ``pages``.

    R lets spans read ``reach`` tokens before them, while all but the first of a step's ``widest`` tokens may
    be rejected: these lie in places that are not read again.
    """
    length = reach + widest - 1
    return jax.tree.map(lambda a: jnp.zeros((slots, length, a.shape[-1]), a.dtype), pages)
