"""The choice in plain jnp, by XLA's sort: the oracle, and the implementation without a Hopper GPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NOTHING = -1
"""The entry of a choice where fewer scores than ``count`` can be chosen."""


def top_k(scores: Float[Array, "*T L"], count: int) -> Int[Array, "*T k"]:
    """`kernels_pallas.top_k.api.top_k` with any number of axes."""
    best, entries = jax.lax.top_k(scores, count)
    return jnp.sort(jnp.where(best > -jnp.inf, entries, NOTHING), axis=-1)
