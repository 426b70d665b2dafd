"""Rows sorted into tiles that belong to one group each."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Above this many pairs counting the equal ones before each costs more than sorting.
_MANY_PAIRS = 8192


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Where each (row, group) pair goes; p pairs, M slots in tiles of one group each.

    Attributes:
        source: pair in each slot; 0 where there is none.
        place: slot of each pair; M for pairs of no group.
        tile_group: group of each tile.
        active: number of tiles that hold anything; they come first.
    """

    source: Int[Array, " M"]
    place: Int[Array, " p"]
    tile_group: Int[Array, " t"]
    active: Int[Array, " 1"]


def group_rows(ids: Int[Array, " p"], groups: int, rows: int) -> Groups:
    """Slots for pairs of groups ``ids``, in tiles of ``rows`` slots, ordered by group and then by pair.

    Ids outside ``[0, groups)`` get none. Few launches on a GPU: no scan, and no sort of few pairs.
    """
    pairs = ids.shape[0]
    tiles = (pairs + min(groups, pairs) * (rows - 1)) // rows
    inside = (ids >= 0) & (ids < groups)
    of_group = jnp.where(inside[:, None], ids[:, None] == jnp.arange(groups), False)
    needed = -(-of_group.sum(axis=0, dtype=jnp.int32) // rows)
    before = jnp.arange(groups)[:, None] < jnp.arange(groups)
    first = jnp.sum(jnp.where(before, needed[:, None], 0), axis=0, dtype=jnp.int32)
    start = jnp.sum(jnp.where(of_group, first * rows, 0), axis=1, dtype=jnp.int32)
    place = jnp.where(inside, start + _rank(ids), tiles * rows)
    source = jnp.zeros(tiles * rows, jnp.int32).at[place].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    tile = jnp.arange(tiles)
    ended = tile[:, None] >= (first + needed)[None]
    tile_group = jnp.minimum(ended.sum(axis=1, dtype=jnp.int32), groups - 1)
    return Groups(source, place, tile_group, needed.sum(keepdims=True, dtype=jnp.int32))


def _rank(ids: Int[Array, " p"]) -> Int[Array, " p"]:
    """How many equal ids come before each."""
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    if ids.shape[0] <= _MANY_PAIRS:
        same = (ids[:, None] == ids) & (index < index[:, None])
        return same.sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    first = jax.lax.cummax(jnp.where(starts, index, 0))
    return jnp.zeros_like(index).at[order].set(index - first)
