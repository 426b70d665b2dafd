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
        end: tiles that belong to each group and those before it; those past the last hold nothing.
    """

    source: Int[Array, " M"]
    place: Int[Array, " p"]
    tile_group: Int[Array, " t"]
    end: Int[Array, " E"]


def group_rows(ids: Int[Array, " p"], groups: int, rows: int) -> Groups:
    """Slots for pairs of groups ``ids``, in tiles of ``rows`` slots, ordered by group and then by pair.

    Ids outside ``[0, groups)`` get none. Few launches on a GPU: no scan, and no sort of few pairs.
    """
    pairs = ids.shape[0]
    tiles = (pairs + min(groups, pairs) * (rows - 1)) // rows
    group = jnp.arange(groups, dtype=jnp.int32)
    needed = -(-(ids[:, None] == group).sum(axis=0, dtype=jnp.int32) // rows)
    end = jnp.sum(jnp.where(group[:, None] <= group, needed[:, None], 0), axis=0, dtype=jnp.int32)
    inside = (ids >= 0) & (ids < groups)
    own = jnp.clip(ids, 0, groups - 1)
    place = jnp.where(inside, (end - needed)[own] * rows + _rank(ids), tiles * rows)
    source = jnp.zeros(tiles * rows, jnp.int32).at[place].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    past = jnp.arange(tiles)[:, None] >= end
    tile_group = jnp.minimum(past.sum(axis=1, dtype=jnp.int32), groups - 1)
    return Groups(source, place, tile_group, end)


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
