"""Windows and chunks of different lengths side by side: one pass reads every weight once for all of them.

A part has rows [B, W]: B sequences, shard by shard of the ``data`` axis, of W tokens each. A pass over one
part has rows of the part's shape. A pass over several has rows [S, R]: the rows of each of S data shards, one
part after the other. Attention alone looks at the parts again, as each has a page table of its own.

A part may be packed: it brings rows [S, R] for some tokens of its windows, and windows again for attention.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from mtp_jax.model.sharding import data_size, partition
from mtp_jax.model.spec import Tree


@struct.dataclass
class Packing:
    """The window tokens that a pass computes: R of each data shard's, in the place of all.

    Attributes:
        tokens: window token of each row, counted over the windows of its shard, int32 [S, R].
        rows: row of each window token, int32 [B, W]; any row for a token that has none.
    """

    tokens: Int[Array, "S R"]
    rows: Int[Array, "B W"]

    def packed(self, windows: Tree) -> Tree:
        """The rows [S, R, ...] of arrays [B, W, ...]."""

        def one(a: Shaped[Array, "B W ..."]) -> Shaped[Array, "S R ..."]:
            return _taken(a.reshape(len(self.tokens), -1, *a.shape[2:]), self.tokens)

        return jax.tree.map(one, windows)

    def unpacked(self, rows: Tree) -> Tree:
        """Arrays [B, W, ...] of rows [S, R, ...]; a token without a row has the values of another one."""

        def one(a: Shaped[Array, "S R ..."]) -> Shaped[Array, "B W ..."]:
            return _taken(a, self.rows.reshape(len(a), -1)).reshape(*self.rows.shape, *a.shape[2:])

        return jax.tree.map(one, rows)


def _taken(rows: Shaped[Array, "S a ..."], index: Int[Array, "S b"]) -> Shaped[Array, "S b ..."]:
    """Some rows of each shard."""
    return jax.vmap(lambda own, i: jnp.take(own, i, axis=0, mode="clip"))(rows, index)


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
