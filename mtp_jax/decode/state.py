"""The device's state between steps: one donated pytree.

Invariant *committed length*: entries of a cache past a slot's ``length`` are garbage and harmless, so
the rollback of rejected drafts is only a length.

Invariant *whole pages*: the contents of a full page, the trunk's latents and the drafter's part, depend on
the tokens up to its end alone, and are all that a sequence needs to go on from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from mtp_jax.decode.arrays import SamplingState, SlotRow
from mtp_jax.decode.expert_counts import ExpertCounts
from mtp_jax.decode.routed import RoutedPages
from mtp_jax.model.cache import WindowCache
from mtp_jax.model.spec import Tree
from mtp_jax.model.trunk import Caches
from mtp_jax.model.visible import MAX_AHEAD

# Declared without jax, which flax imports: not by `flax.struct`.
jax.tree_util.register_dataclass(SlotRow)


class Slots(struct.PyTreeNode):
    """The rows of the decode batch. First axis of every field: slots.

    Attributes:
        length: committed length: rows of the trunk's cache that count; also the position of ``newest``.
        newest: the last emitted token, not yet in the trunk's cache.
        active: whether steps advance the slot; a finished slot switches itself off.
        remaining: tokens the slot may still emit.
        generated: tokens emitted so far.
        depth: most drafts of the slot's request that one step verifies.
        suffix: whether its drafts may come from a suffix match, where the drafter has them.
        page_table: pages in order, local to the slot's data shard; the spare last page where unallocated.
        sampling: the request's options of sampling.
        texts: see ``SlotRow.texts``.
    """

    length: Int[Array, " B"]
    newest: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    generated: Int[Array, " B"]
    depth: Int[Array, " B"]
    suffix: Bool[Array, " B"]
    page_table: Int[Array, "B n"]
    sampling: SamplingState
    texts: Int[Array, "B N"] | None = None


class DrafterState(struct.PyTreeNode):
    """A drafter's own subtree of the state.

    Attributes:
        slots: state of each slot; first axis of every leaf: slots.
        pages: state in each page; first axis of every leaf: the pages of all data shards.
    """

    slots: Any
    pages: Any

    def of(self, which: "Which") -> "DrafterState":
        """The drafter's state of some slots, and of all pages."""
        return self.replace(slots=take_slots(self.slots, which))

    def put(self, which: "Which", part: "DrafterState", before: "DrafterState") -> "DrafterState":
        """The state with this part of some slots, and all pages. before: the part that ``of`` returned."""
        return DrafterState(put_slots(self.slots, which, part.slots, before.slots), part.pages)


class State(struct.PyTreeNode):
    """The trunk's cache, one part per group of ``Params.layers``, the slots, and the drafter's part.

    Attributes:
        experts: counts of chosen experts; None where nothing is counted.
        routed: experts that each token in a page chose; None where they are not kept.
    """

    trunk: Caches
    slots: Slots
    drafter: DrafterState
    experts: ExpertCounts | None = None
    routed: RoutedPages | None = None

    @property
    def in_pages(self) -> tuple[Any, ...]:
        """Everything that lies in pages: a cache of the trunk each, the drafter's part, chosen experts."""
        own = (c.pages if isinstance(c, WindowCache) else c for c in self.trunk)
        return *own, self.drafter.pages, self.routed

    @property
    def in_slots(self) -> tuple[Any, ...]:
        """Everything that lies in slots: the slots, the drafter's part, and that of each of the caches."""
        own = (c.slots if isinstance(c, WindowCache) else None for c in self.trunk)
        return self.slots, self.drafter.slots, tuple(own)

    def with_pages(self, parts: Sequence[Any]) -> "State":
        """The state with other contents of ``in_pages``."""

        def put(cache: Any, pages: Any) -> Any:
            return replace(cache, pages=pages) if isinstance(cache, WindowCache) else pages

        *caches, drafter, routed = parts
        trunk = tuple(map(put, self.trunk, caches))
        return self.replace(trunk=trunk, drafter=self.drafter.replace(pages=drafter), routed=routed)

    def with_slots(self, parts: tuple[Any, ...]) -> "State":
        """The state with other contents of ``in_slots``."""
        slots, drafter, caches = parts

        def put(cache: Any, own: Any) -> Any:
            return replace(cache, slots=own) if isinstance(cache, WindowCache) else cache

        trunk, drafter = tuple(map(put, self.trunk, caches)), self.drafter.replace(slots=drafter)
        return self.replace(trunk=trunk, slots=slots, drafter=drafter)


@dataclass(frozen=True)
class StateShape:
    """Sizes of a ``State``. ``columns`` is the width of the page table.

    ``pages`` are per data shard and can be handed out; each shard has one more (spare) for padding.
    ``dtype``: the cache's; ``fp8``: latents are in e4m3 instead. ``window``: most tokens of a slot that a
    step verifies, for which a cache keeps room; the widest window that there is, unless it is narrower.
    ``routed``: whether pages have the experts that tokens chose. ``texts``: tokens of other requests' outputs
    that a slot sees.
    """

    slots: int
    pages: int
    page_size: int
    columns: int
    dtype: str = "float32"
    fp8: bool = False
    window: int = MAX_AHEAD + 1
    routed: bool = False
    texts: int = 0


Which = int | Int[Array, " G"]
"""Slots of the rows: an int n means the first n slots, an array lists them."""


def take_slots(slots: Tree, which: Which) -> Tree:
    """The rows of some slots; a number past the last slot gives a row without meaning."""

    def take(a: Array) -> Array:
        if isinstance(which, int):
            return a if a.shape[0] == which else a[:which]
        return jnp.take(a, which, axis=0, mode="clip")

    return jax.tree.map(take, slots)


def put_slots(slots: Tree, which: Which, rows: Tree, before: Tree) -> Tree:
    """``slots`` with the rows of some slots replaced; rows for numbers past the last slot are dropped.

    before: the rows as they were taken; an array that is the same object there is not written.
    """

    def put(a: Array, new: Array, old: Array) -> Array:
        if new is old:
            return a
        if not isinstance(which, int):
            return a.at[which].set(new, mode="drop")
        return new if a.shape[0] == which else jax.lax.dynamic_update_slice_in_dim(a, new, 0, axis=0)

    return jax.tree.map(put, slots, rows, before)
