"""Greedy decoding's tokens, computed from one part of the vocabulary after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.sampling import all_finite, argmax
from mtp_jax.model.backend import Backend
from mtp_jax.model.narrow import Table


@jax.named_scope("greedy")
def best_tokens(
    hidden: Float[Array, "*b D"], table: Table, on: Backend
) -> tuple[Int[Array, "*b"], Bool[Array, "*b"]]:
    """``argmax`` of every row's logits and whether all are finite, by parts (``Products.head_parts``)."""
    size = -(-table.shape[0] // on.products.head_parts(hidden))

    def of(start: int, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        part: Table = jax.tree.map(lambda a: a[start : start + size], table)
        logits = on.products.head(hidden, part)
        return jnp.max(logits, axis=-1), argmax(logits) + start, all_finite(logits)

    best, ids, finite = of(0, hidden)
    for start in range(size, table.shape[0], size):
        # One part after the other: else XLA computes the logits of all parts first, and keeps them.
        hidden, best, ids, finite = jax.lax.optimization_barrier((hidden, best, ids, finite))
        top, candidates, whole = of(start, hidden)
        ids = jnp.where(top > best, candidates, ids)  # not at equality: the lowest id wins
        best, finite = jnp.maximum(top, best), finite & whole
    return ids, finite
