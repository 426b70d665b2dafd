"""Trees of drafts: node 0 of a window is its newest token, node i its draft i - 1.

A tree is given by the parents of its drafts, int32 [B, K]: the node that each one follows, an earlier one. So
the first drafts of a tree are a tree, whatever their number. A node's lineage has a bit for every draft on
the way to it, itself included: the bits of ``Window.ancestors``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mtp_jax.decode.keys import MAX_DRAFTS
from mtp_jax.errors import ConfigError


def lineage(parents: Int[Array, "B K"]) -> Int[Array, "B W"]:
    """The lineage of every node: bit i is set if draft i is the node itself or one that it follows.

    Raises ConfigError for more drafts than there are bits.
    """
    drafts = parents.shape[1]
    if drafts > MAX_DRAFTS:
        raise ConfigError(f"a tree of {drafts} drafts; the most is {MAX_DRAFTS}")
    bits = jnp.pad(1 << jnp.arange(drafts), (1, 0)) + jnp.zeros((len(parents), 1), jnp.int32)
    up = jnp.pad(parents, ((0, 0), (1, 0)))
    for _ in range(drafts.bit_length()):  # each round looks twice as far up
        bits |= jnp.take_along_axis(bits, up, axis=1)
        up = jnp.take_along_axis(up, up, axis=1)
    return bits


def depths(lineage: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """The number of drafts on the way to every node."""
    return jax.lax.population_count(lineage)


def along(path: Int[Array, "B n"] | None, nodes: Shaped[Array, "B W ..."]) -> Shaped[Array, "B n ..."]:
    """The values of the nodes of a path; None: a chain, which is its own path."""
    if path is None:
        return nodes
    return jnp.take_along_axis(nodes, path.reshape(*path.shape, *(1,) * (nodes.ndim - 2)), axis=1)
