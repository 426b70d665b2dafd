"""Counts of chosen experts, made on the device; the balancer places experts by them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mtp_jax.decode.arrays import ExpertLayout
from mtp_jax.model.moe import Routing
from mtp_jax.model.sharding import data_size, partition, sharded


class ExpertCounts(struct.PyTreeNode):
    """Counts since the host last read them. First axis of both fields: data shards.

    Attributes:
        load: rows of each shard that chose each expert, by MoE layer of the trunk.
        over: launches in which the all-to-all of a layer had no room for all rows.
    """

    load: Int[Array, "S L E"]
    over: Int[Array, "S L"]


def no_counts(layout: ExpertLayout, mesh: Mesh | None) -> ExpertCounts:
    """Counts of zero."""
    shape = data_size(mesh), layout.layers
    return ExpertCounts(jnp.zeros((*shape, layout.experts), jnp.int32), jnp.zeros(shape, jnp.int32))


@jax.named_scope("count_experts")
def counted(counts: ExpertCounts, routing: Sequence[Routing], mesh: Mesh | None) -> ExpertCounts:
    """The counts with the choices of one more pass. Each shard counts its own rows; nothing is sent."""
    ids = jnp.stack([r.ids.reshape(len(r.ids), -1) for r in routing], axis=1)
    zero = jnp.zeros((), jnp.int32)
    over = jnp.stack([zero if r.over is None else r.over for r in routing])

    def local(load: Array, ids: Array) -> Array:
        _, layers, experts = load.shape
        flat = jnp.where(ids >= 0, ids + jnp.arange(layers)[:, None] * experts, load.size)
        return load.reshape(-1).at[flat.reshape(-1)].add(1, mode="drop").reshape(load.shape)

    slots = partition("slots")
    load = sharded(local, mesh, (slots, slots), slots)(counts.load, ids)
    return ExpertCounts(load, counts.over + over)


def taken(counts: ExpertCounts) -> tuple[ExpertCounts, tuple[Int[Array, "L E"], Int[Array, " L"]]]:
    """Return (counts of zero, (load of all shards, ``over``))."""
    read = counts.load.sum(axis=0), counts.over.max(axis=0)
    return jax.tree.map(jnp.zeros_like, counts), read
