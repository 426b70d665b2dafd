"""Which rows each query sees."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Limits:
    """Query t < ``count`` of a slot sees the rows from ``begin`` up to ``diagonal + t``, only below ``end``.

    Rows are numbered within the block that is attended to; ``diagonal`` may be negative or past it. All are
    int32 [B].
    """

    count: jax.Array
    begin: jax.Array
    diagonal: jax.Array
    end: jax.Array

    def mask(self, queries: int, rows: int) -> jax.Array:
        """The same as bool [B, queries, rows]; what queries past the count see is not defined by it."""
        t, row = jnp.arange(queries)[:, None], jnp.arange(rows)
        begin, diagonal, end = (x[:, None, None] for x in (self.begin, self.diagonal, self.end))
        return (row >= begin) & (row <= diagonal + t) & (row < end)

    def within(self, start: jax.Array | int, rows: int) -> "Limits":
        """The same of the block of ``rows`` rows that begins at row ``start``."""
        return Limits(
            self.count,
            jnp.clip(self.begin - start, 0, rows),
            self.diagonal - start,
            jnp.clip(self.end - start, 0, rows),
        )
