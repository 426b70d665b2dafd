"""Two halves of a pass's slots: while rows of one travel to their experts, the other is multiplied.

Source: arXiv 2412.19437, section 3.4; SGLang calls it two-batch overlap. Here both halves are part of one
program. XLA would join their products, which share weights, and have each half wait for the other: barriers
put the halves in an order (``after``).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from mtp_jax.model.backend import Backend
from mtp_jax.model.moe import Routing
from mtp_jax.model.sharding import data_size

Batch = PyTree
"""A tree of arrays whose first axis is slots, shard by shard of the ``data`` axis."""


def count(slots: int, parts: int, on: Backend) -> int:
    """Number of batches that a pass over ``slots`` slots, in ``parts`` parts, is cut into."""
    even = slots % (on.micro_batches * data_size(on.mesh)) == 0
    return on.micro_batches if parts == 1 and even else 1


def cut(batch: Batch, parts: int, on: Backend) -> list[Batch]:
    """Batches of a pass in ``parts`` parts; each has a share of every data shard's slots."""
    batches = count(len(jax.tree.leaves(batch)[0]), parts, on)
    if batches == 1:
        return [batch]

    def part(a: Shaped[Array, "B ..."], at: int) -> Shaped[Array, "b ..."]:
        return a.reshape(data_size(on.mesh), batches, -1, *a.shape[1:])[:, at].reshape(-1, *a.shape[1:])

    return [jax.tree.map(lambda a, i=i: part(a, i), batch) for i in range(batches)]


def joined(batches: list[Batch], on: Backend) -> Batch:
    """Undoes ``cut``."""
    if len(batches) == 1:
        return batches[0]

    def one(*parts: Shaped[Array, "b ..."]) -> Shaped[Array, "B ..."]:
        split = [a.reshape(data_size(on.mesh), 1, -1, *a.shape[1:]) for a in parts]
        return jnp.concatenate(split, axis=1).reshape(-1, *parts[0].shape[1:])

    return jax.tree.map(one, *batches)


def joined_routing(batches: Sequence[Routing], on: Backend) -> Routing:
    """Undoes ``cut`` of the routing of a layer; values that kernels alone read are left out."""
    if len(batches) == 1:
        return batches[0]
    ids, weights = joined([(r.ids, r.weights) for r in batches], on)
    over = [r.over for r in batches if r.over is not None]
    return Routing(ids, weights, over=jnp.stack(over).sum(axis=0) if over else None)


def after(x: Batch, earlier: PyTree) -> Batch:
    """``x``, available only after ``earlier``; None: at once."""
    return x if earlier is None else jax.lax.optimization_barrier((x, earlier))[0]
