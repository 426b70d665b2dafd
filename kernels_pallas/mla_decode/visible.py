"""Which cached rows each window token attends to."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Bits of ``Visible.ahead``: the sign bit stays clear.
MAX_AHEAD = 31


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visible:
    """Rows of each slot that its window tokens attend to: a range that all see, then a bit per row.

    An idle slot has length 0 and no bit set; its output is zero.

    Attributes:
        first: first row that exists, int32 [B].
        length: all tokens of the slot see the rows from ``first`` up to, not including, this one, int32 [B].
        ahead: bit i set: the token also sees row ``length + i``, i < 31, int32 [B, W].
    """

    first: jax.Array
    length: jax.Array
    ahead: jax.Array

    def end(self) -> jax.Array:
        """One past the last row that any token of the slot sees, int32 [B]."""
        return self.length + 32 - jax.lax.clz(self.seen())

    def seen(self) -> jax.Array:
        """The bits set for some token of the slot, int32 [B]."""
        return jnp.bitwise_or.reduce(self.ahead, axis=1)

    def mask(self, rows: int) -> jax.Array:
        """The same as bool [B, W, rows]."""
        row = jnp.arange(rows)
        bits = self.ahead[..., None] >> jnp.clip(row - self.length[:, None, None], 0, MAX_AHEAD)
        seen = (row < self.length[:, None, None]) | (bits & 1 == 1)
        return seen & (row >= self.first[:, None, None])


def causal(length: jax.Array, window: int) -> Visible:
    """Token w of a slot sees the rows up to ``length + w``, its own; none if the length is negative."""
    bits = (2 << jnp.arange(window)) - 1
    ahead = jnp.where(length[:, None] < 0, 0, bits)
    return Visible(jnp.zeros_like(length), jnp.maximum(length, 0), ahead.astype(jnp.int32))
