"""Windows and chunks of different lengths side by side: one pass reads every weight once for all of them.

A part has rows [B, W]: B sequences, shard by shard of the ``data`` axis, of W tokens each. A pass over one
part has rows of the part's shape. A pass over several has rows [S, R]: the rows of each of S data shards, one
part after the other. Attention alone looks at the parts again, as each has a page table of its own.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from mtp_jax.model.sharding import data_size, partition

Tree = TypeVar("Tree")


def join(parts: Sequence[Shaped[Array, "_B _W ..."]], mesh: Mesh | None) -> Shaped[Array, "S R ..."]:
    """The rows of all parts, side by side; a lone part as it is."""
    if len(parts) == 1:
        return parts[0]
    shards = data_size(mesh)
    flat = [a.reshape(shards, -1, *a.shape[2:]) for a in parts]
    rows = jnp.concatenate(flat, axis=1)
    if mesh is None:
        return rows
    # Heads, where there are any, stay where they are.
    where = PartitionSpec(*partition("slots"), *(PartitionSpec.UNCONSTRAINED,) * (rows.ndim - 1))
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, where))


def split_tree(tree: Tree, shapes: Sequence[tuple[int, ...]], mesh: Mesh | None) -> list[Tree]:
    """``split`` every array of a tree; returns a tree for each part."""
    leaves, whole = jax.tree.flatten(tree)
    parts = [split(a, shapes, mesh) for a in leaves]
    return [whole.unflatten([part[i] for part in parts]) for i in range(len(shapes))]


def split(
    rows: Shaped[Array, "S R ..."], shapes: Sequence[tuple[int, ...]], mesh: Mesh | None
) -> list[Shaped[Array, "_B _W ..."]]:
    """Parts of these shapes [B, W], from the rows that ``join`` made of them."""
    if len(shapes) == 1:
        return [rows]
    shards, parts, at = data_size(mesh), [], 0
    for shape in shapes:
        end = at + math.prod(shape) // shards
        parts.append(rows[:, at:end].reshape((*shape, *rows.shape[2:])))
        at = end
    return parts
