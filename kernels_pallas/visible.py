"""The cached rows that each token of a window attends to: one type for both attention kernels and XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

# Bits of ``Window.ancestors``: the sign bit stays clear. A window has at most one token more.
MAX_AHEAD = 31


@struct.dataclass
class Window:
    """Rows of each slot that its window tokens see: a range for all tokens, then rows of each token.

    A slot's rows are numbered in order. Tokens from ``count`` on see nothing: they are padding, or their slot
    is idle. The kernel's results for them are finite but undefined.

    Attributes:
        first: first row of the slot, int32 [B].
        length: all tokens see the rows from ``first`` up to, not including, this one, int32 [B]. The row of
            the window's first token is among them, because the other tokens follow it.
        count: number of tokens that see rows, int32 [B].
        ancestors: int32 [B, W]; bit i is set if the token also sees row ``length + i``, i < 31. None: a
            chain, of any length, in which token t sees the next t rows.
    """

    first: jax.Array
    length: jax.Array
    count: jax.Array
    ancestors: jax.Array | None = None

    def end(self) -> jax.Array:
        """One past the last row that any token of the slot sees, int32 [B]; 0 where none sees one."""
        more = self.count - 1 if self.ancestors is None else 32 - jax.lax.clz(self.seen_ahead())
        return jnp.where(self.count > 0, jnp.maximum(self.length + more, 0), 0)

    def seen_ahead(self) -> jax.Array:
        """The bits of ``ancestors`` that are set for at least one token of the slot, int32 [B]."""
        assert self.ancestors is not None, "a chain has no bits; ask `bits` for it"
        counts = jnp.arange(self.ancestors.shape[1]) < self.count[:, None]
        return jnp.bitwise_or.reduce(jnp.where(counts, self.ancestors, 0), axis=1)

    def seen(self, rows: int, start: jax.Array | int = 0) -> jax.Array:
        """Whether some token sees row ``start``, ``start + 1``, ...: bool [B, rows]."""
        row = start + jnp.arange(rows)
        here = (row >= self.first[:, None]) & (row < self.end()[:, None])
        if self.ancestors is None:
            return here
        return here & self._of_bits(row, self.seen_ahead()[:, None])

    def mask(self, width: int, rows: int, start: jax.Array | int = 0) -> jax.Array:
        """Whether each of ``width`` tokens sees row ``start``, ``start + 1``, ...: bool [B, width, rows]."""
        token, row = jnp.arange(width)[:, None], start + jnp.arange(rows)
        first, count = self.first[:, None, None], self.count[:, None, None]
        if self.ancestors is None:
            seen = row < self.length[:, None, None] + token
        else:
            seen = self._of_bits(row, self.ancestors[..., None])
        return seen & (row >= first) & (token < count)

    def _of_bits(self, row: jax.Array, bits: jax.Array) -> jax.Array:
        length = self.length.reshape(-1, *(1,) * (bits.ndim - 1))
        bit = bits >> jnp.clip(row - length, 0, MAX_AHEAD)
        return (row < length) | (bit & 1 == 1)

    def bits(self, width: int, rows: int) -> "Window":
        """The window with ``ancestors`` of ``width`` tokens, in a cache of ``rows`` rows; none in idle slots.

        Raises ValueError for a chain of more tokens than there are bits.
        """
        if width > MAX_AHEAD + 1:
            raise ValueError(f"a window of {width} tokens, at most {MAX_AHEAD + 1}")
        token = jnp.arange(width)
        ancestors = self.ancestors
        if ancestors is None:
            # 2^t - 1 without 2^31, which int32 cannot hold.
            ancestors = (1 << jnp.minimum(token, 30)) - 1 | jnp.where(token > 30, 1 << 30, 0)
        length = jnp.where(self.count > 0, jnp.clip(self.length, 0, rows), 0)
        exist = jnp.where(rows - length > 30, 2**31 - 1, (1 << jnp.clip(rows - length, 0, 30)) - 1)
        ancestors = jnp.where(token < self.count[:, None], ancestors & exist[:, None], 0)
        return replace(self, length=length, ancestors=ancestors.astype(jnp.int32))

    def shifted(self, start: jax.Array | int) -> "Window":
        """The window with rows numbered from row ``start`` on."""
        return replace(self, first=self.first - start, length=self.length - start)


def chain(start: jax.Array, count: jax.Array | int, first: jax.Array | int = 0) -> Window:
    """Tokens in rows ``start``, ``start + 1``, ... [B], ``count`` of them: each sees the rows up to its own.

    first: first row of the slot.
    """
    whole = jnp.zeros_like(start)
    return Window(whole + first, start + 1, whole + count)
