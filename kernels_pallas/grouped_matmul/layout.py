"""Rows sorted by group, and the tiles that cover them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

# Groups begin at multiples of this number: a tile's results are copied in pieces of so many rows.
ALIGNMENT = 8
# Above this number of pairs a sort is faster than counting the equal pairs before each pair.
_MANY_PAIRS = 8192


@struct.dataclass
class Tiles:
    """The rows that each tile multiplies, and their group.

    Attributes:
        table: int32; group, first row and number of rows of each tile, a multiple of 8.
        count: int32; the first entry is the number of tiles with rows, which come first.
    """

    table: Int[Array, "3 t"]
    count: Int[Array, " n"]


@struct.dataclass
class Groups:
    """The slots of each token's rows; of M slots, a group's lie side by side.

    Attributes:
        token: token in each slot; any number in an unused slot. None: the slots of each group are all tokens.
        place: slot of each choice and token; M for an id that is no group.
        tiles: the tiles of the slots.
    """

    token: Int[Array, " M"] | None
    place: Int[Array, "k T"]
    tiles: Tiles


class OwnGroups(NamedTuple):
    """The groups that a device has, of all groups: ``count`` of them from number ``first`` on."""

    first: Int[Array, ""] | int
    count: int


def slots(pairs: int, groups: int, rows: int) -> int:
    """Number of slots that suffice for any choice of groups, and for reading the last tile whole."""
    return -(-(pairs + min(groups, pairs) * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT + rows


def tiles(pairs: int, groups: int, rows: int) -> int:
    """Number of tiles of ``rows`` rows that suffice for any choice of groups."""
    return (pairs + min(groups, pairs) * (rows - 1)) // rows


def group_rows(choices: Int[Array, "T k"], groups: int, rows: int) -> Groups:
    """Slots for all choices, ordered by group and then by token, and tiles of ``rows`` slots.

    Ids outside ``[0, groups)`` get no slot. Few launches on a GPU: no scan, and no sort of few pairs.
    """
    ids = choices.reshape(-1)
    pairs = ids.shape[0]
    total = slots(pairs, groups, rows)
    group = jnp.arange(groups, dtype=jnp.int32)
    size = (ids[:, None] == group).sum(axis=0, dtype=jnp.int32)
    first = _before(_aligned(size))
    inside = (ids >= 0) & (ids < groups)
    place = jnp.where(inside, first[jnp.clip(ids, 0, groups - 1)] + _rank(ids), total)
    token = jnp.arange(pairs, dtype=jnp.int32) // choices.shape[1]
    token = jnp.zeros(total, jnp.int32).at[place].set(token, mode="drop")
    needed = -(-size // rows)
    begin = _before(needed)
    tile = jnp.arange(tiles(pairs, groups, rows), dtype=jnp.int32)
    of = jnp.minimum((tile[:, None] >= begin + needed).sum(axis=1, dtype=jnp.int32), groups - 1)
    done = (tile - begin[of]) * rows
    height = jnp.clip(_aligned(size[of] - done), 0, rows)
    table = jnp.stack([of, first[of] + done, height])
    return Groups(token, place.reshape(choices.shape).T, Tiles(table, needed.sum(keepdims=True)))


def few(tokens: int) -> bool:
    """Whether the rows of all tokens fit the padding of a group: then ``group_all`` lays them out."""
    return tokens <= ALIGNMENT


def group_all(choices: Int[Array, "T k"], groups: int, rows: int) -> Groups:
    """Slots of all tokens, 8 at most, for each group that a token chose; groups in order, a tile for each.

    A tile multiplies more rows anyway, and so the tokens' rows need no copy. Ids outside ``[0, groups)``
    get no slot. rows: rows of a tile.
    """
    ids, token = choices.T.reshape(-1), jnp.arange(len(choices), dtype=jnp.int32)
    pairs = ids.shape[0]
    index = jnp.arange(pairs)
    again = ((ids[:, None] == ids) & (index < index[:, None])).any(axis=1)
    inside = (ids >= 0) & (ids < groups)
    fresh = inside & ~again
    number = (fresh & (ids < ids[:, None])).sum(axis=1, dtype=jnp.int32)
    tile = jnp.arange(all_tiles(pairs, groups), dtype=jnp.int32)
    of = jnp.where(fresh & (number == tile[:, None]), ids, 0).sum(axis=1, dtype=jnp.int32)
    count = fresh.sum(keepdims=True, dtype=jnp.int32)
    table = jnp.stack([of, tile * ALIGNMENT, jnp.where(tile < count, ALIGNMENT, 0)])
    place = number.reshape(choices.T.shape) * ALIGNMENT + token
    place = jnp.where(inside.reshape(place.shape), place, slots(pairs, groups, rows))
    return Groups(None, place, Tiles(table, count))


def all_tiles(pairs: int, groups: int) -> int:
    """Number of tiles of ``group_all``: one for each pair or group, a multiple of 8."""
    return -(-min(pairs, groups) // ALIGNMENT) * ALIGNMENT


def _aligned(size: Int[Array, " n"]) -> Int[Array, " n"]:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _before(size: Int[Array, " E"]) -> Int[Array, " E"]:
    """The sum of the sizes before each size."""
    group = jnp.arange(size.shape[0])
    return jnp.sum(jnp.where(group[:, None] < group, size[:, None], 0), axis=0, dtype=jnp.int32)


def _rank(ids: Int[Array, " p"]) -> Int[Array, " p"]:
    """The number of equal ids before each id."""
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    if ids.shape[0] <= _MANY_PAIRS:
        same = (ids[:, None] == ids) & (index < index[:, None])
        return same.sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    first = jax.lax.cummax(jnp.where(starts, index, 0))
    return jnp.zeros_like(index).at[order].set(index - first)
