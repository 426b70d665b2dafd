"""The parameters on a runner's devices, which are dropped, kept on the host, put back and replaced.

New weights come leaf by leaf, and large leaves in pieces, so that no message between hosts is large. Each
rank places its own shards.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from mtp_jax.decode.launches import WeightPart
from mtp_jax.model.backend import Backend
from mtp_jax.model.narrow import is_narrow, with_bits, without_bits
from mtp_jax.model.params import Params, shapes

_PIECE = 2**28  # bytes: far below the most of a message, and a fraction of a second on a fast network


class Weights:
    """The parameters of one runner.

    Attributes:
        params: layer by layer; a dropped part has only its shapes here.
    """

    def __init__(self, params: Params, on: Backend) -> None:
        self.params = params
        self._on, self._shapes = on, shapes(params)
        self._where = [getattr(a, "sharding", None) for a in _leaves(params)]
        self._kept: dict[WeightPart, list[_Shards]] = {}
        self._placed: list[jax.Array] = []
        self._piece: np.ndarray | None = None  # of a leaf that comes in several pieces

    def drop(self, part: WeightPart, backup: bool) -> None:
        """Free the memory of a part. backup: keep this process's shards on the host, for ``restore``."""
        self._kept.pop(part, None)
        if backup:
            self._kept[part] = [_Shards(a) for a in _leaves(part_of(self.params, part))]
        self._set(part, part_of(self._shapes, part))
        self._placed, self._piece = [], None

    def restore(self, part: WeightPart) -> None:
        """Put a part back that was dropped with a backup."""
        self._finish(part, [shards.placed() for shards in self._kept.pop(part)])

    def put(self, part: WeightPart, begin: int, rows: np.ndarray) -> None:
        """Put the next rows of a dropped part, from row ``begin`` of the next leaf; the last rows end it."""
        wanted = _leaves(part_of(self._shapes, part))
        shape, where = wanted[len(self._placed)].shape, self._places(part)[len(self._placed)]
        if rows.shape != shape:
            whole = np.empty(shape, rows.dtype) if self._piece is None else self._piece
            whole[begin : begin + len(rows)] = rows
            if begin + len(rows) < shape[0]:
                self._piece = whole
                return
            rows, self._piece = whole, None
        self._placed.append(_placed(rows, where))
        if len(self._placed) == len(wanted):
            placed, self._placed = self._placed, []
            self._finish(part, placed)

    def _places(self, part: WeightPart) -> list[Any]:
        """The shardings of a part's leaves."""
        tree = jax.tree.structure(_bare(self._shapes))
        return jax.tree.leaves(part_of(tree.unflatten(self._where), part))

    def _finish(self, part: WeightPart, placed: list[jax.Array]) -> None:
        like = part_of(self._shapes, part)
        new = jax.tree.structure(_bare(like)).unflatten(placed)
        placed.clear()

        def kept(old: PyTree, now: PyTree) -> PyTree:
            return now if without_bits(old) is old else with_bits(now)

        new = jax.tree.map(kept, like, new, is_leaf=is_narrow)
        self._set(part, self._on.laid_out(new) if part == "weights" else new)

    def _set(self, part: WeightPart, new: Any) -> None:
        trunk, drafts = (new, self.params.drafts) if part == "weights" else (self.params, new)
        self.params = trunk.with_drafts(drafts)


class _Shards:
    """This process's shards of an array in the host's memory, each once."""

    def __init__(self, array: jax.Array) -> None:
        self._shape, self._where = array.shape, array.sharding
        self._host = dict[str, np.ndarray]()
        for shard in array.addressable_shards:
            if (name := str(shard.index)) not in self._host:
                self._host[name] = np.asarray(shard.data)

    def placed(self) -> jax.Array:
        return jax.make_array_from_callback(self._shape, self._where, lambda index: self._host[str(index)])


def part_of(params: Params, part: WeightPart) -> PyTree:
    """A part of the parameters: ``Params`` without a drafter's, or ``DraftLayers``."""
    return params.drafts if part == "draft" else params.with_drafts()


def pieces(params: Params, part: WeightPart) -> Iterator[tuple[int, np.ndarray]]:
    """The arguments of ``put`` for all leaves of a part: each leaf whole, or some of its rows at a time."""
    for array in _leaves(part_of(params, part)):
        each = len(array) if array.nbytes <= _PIECE else max(1, _PIECE // array[0].nbytes)
        for begin in range(0, len(array), each):
            yield begin, array[begin : begin + each]


def _bare(tree: Any) -> Any:
    return jax.tree.map(without_bits, tree, is_leaf=is_narrow)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(_bare(tree))


def _placed(whole: np.ndarray, where: Any) -> jax.Array:
    """An array on its devices. ``jax.device_put`` would have the hosts compare it."""
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])
