"""A draft module as a drafter, by recursion: keeping its cache, and drafting ahead of it.

The module is the model's NextN layers or an EAGLE-3 head (``model.draft_module``); an entry of its cache is a
*NextN entry* for either.

Invariant *warm draft cache*: the NextN cache is extended for every committed token, at every depth, so that
drafting can begin at any step. Entries are indexed by the token: entry j of layer 0 holds the pair
(h_{j-1}, t_j), entry j of layer k the pair (z_{k-1} of entry j-1, t_j), so entries 0..k of layer k do not
exist. Like the trunk's cache it ends before the newest token.

Invariant *page boundary hidden states*: beside each full page stand the hidden states that the next NextN
entries merge, so a sequence that begins with cached pages goes on, drafting too, as if it had computed them.
They are written with the page's last entry.

Only drafts read NextN entries. Steps without drafts defer theirs, ``DEFERRED`` at most, and ``flush`` writes
them in one pass: step by step they were most of the cost of a NextN layer where nothing is drafted.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.drawn import Made
from mtp_jax.decode.drafter.grow import GrownTrees
from mtp_jax.decode.drafter.protocol import Committed, Drafts, width_of
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import TreeShape
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model import draft_module
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, PagedView, empty_cache
from mtp_jax.model.draft_module import DraftModule, Pass
from mtp_jax.model.indexer import Choice
from mtp_jax.model.params import Params, type_of

# Steps without drafts whose NextN entries one pass writes: one launch is paid for all of them.
DEFERRED = 16


class RecursiveSlots(struct.PyTreeNode):
    """The state of each slot.

    Attributes:
        pending: the hidden states that the entry after the written ones merges, by layer: the fused one of
            the last token that has an entry for layer 0, z_{k-1} of it for layer k.
        tokens: committed tokens whose entries are deferred: the last of each slot, in order.
        features: hidden states of these tokens, not fused yet.
        count: number of these tokens; elements past it are garbage.
    """

    pending: Float[Array, "B k D"]
    tokens: Int[Array, "B n"]
    features: tuple[Float[Array, "B n T"], ...]
    count: Int[Array, " B"]


class RecursivePages(struct.PyTreeNode):
    """The state in each page: every layer's entries, and the boundary hidden states."""

    cache: tuple[LayerCache, ...]
    boundary: Float[Array, "P one kD"]


@dataclass(frozen=True)
class Recursive:
    """Drafts by recursion through a module's layers; with more drafts than layers these are reused."""

    module: DraftModule
    tree: TreeShape | None = None
    deferral: int = DEFERRED

    @property
    def features(self) -> tuple[int, ...]:
        """The module's."""
        return self.module.features

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No entries, nothing deferred."""
        cfg, numbers, kind = self.module.cfg, self.module.numbers, type_of[shape.dtype]
        number, tokens = jnp.zeros(shape.slots, jnp.int32), jnp.zeros((shape.slots, DEFERRED), jnp.int32)
        pending = jnp.zeros((shape.slots, len(numbers), self.module.width), kind)
        widths = [width_of(self.module.trunk, number) for number in self.features]
        features = tuple(jnp.zeros((shape.slots, DEFERRED, width), kind) for width in widths)
        cache = tuple(empty_cache(pages, shape.page_size, cfg, i, kind, fp8=shape.fp8) for i in numbers)
        boundary = jnp.zeros((pages, 1, len(numbers) * self.module.width), kind)
        return DrafterState(
            RecursiveSlots(pending, tokens, features, number), RecursivePages(cache, boundary)
        )

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot; layers are reused, step modulo layers.

        A layer merges the result of the layer before for the same rows. So each of several layers but the
        last runs on the rows of the newest token and of all drafts so far: it sees the rows that a text would
        show it.

        The entries of the newest token and of the drafts that it leaves in the cache are past the committed
        length, garbage once the step is over. A slot that verifies fewer drafts is idle in the later passes:
        its drafts there mean nothing.

        More drafts than a tree has steps are a tree of them (``grow``).
        """
        if self.tree and rules.depth > self.tree.steps and not rules.logits:
            (cache,) = own.pages.cache
            trees = GrownTrees(self.module, params, on, s, rules, self.tree)
            drafts, cache = trees.grow(own.slots.pending[:, :1], cache)
            return drafts, own.replace(pages=own.pages.replace(cache=(cache,)))
        layers = len(own.pages.cache)
        passes, depth = _Passes(self.module, on, params, s, rules, own.slots.pending), rules.depth
        ahead = passes.start(own.pages.cache)
        # Several layers, and a choice that the first pass makes for all, differ from pass to pass.
        unlike = depth if layers > 1 else min(int(passes.share), depth)
        for k in range(unlike):
            ahead = passes.draft(k, ahead)
        ahead = on.repeated(unlike, depth, rules.wanted, passes.draft, ahead)
        return ahead.made.drafts(s, rules), own.replace(pages=own.pages.replace(cache=ahead.cache))

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Write the entries of these tokens, or keep the state from which ``flush`` writes them."""
        if seen.defer:
            return own.replace(slots=_deferred(own.slots, seen))
        return self._extend(params, own, seen, on)

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Write the deferred entries, and the boundary hidden states of pages that they fill."""
        slots: RecursiveSlots = own.slots
        index, count = jnp.arange(slots.tokens.shape[1]), slots.count[:, None]
        positions = jnp.where(index < count, s.length[:, None] - count + index, -1)
        seen = Committed(slots.tokens, positions, slots.features, slots.count, s.page_table)
        with jax.named_scope("flush"):
            own = self._extend(params, own, seen, on)
        return own.replace(slots=own.slots.replace(count=jnp.zeros_like(slots.count)))

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """Take the pending hidden states from the page's end."""
        slots: RecursiveSlots = own.slots
        found = jax.lax.dynamic_index_in_dim(own.pages.boundary, page, axis=0)
        found = found.reshape(1, *slots.pending.shape[1:])
        pending = jax.lax.dynamic_update_slice_in_dim(slots.pending, found, slot, axis=0)
        return own.replace(slots=slots.replace(pending=pending))

    def _extend(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Write the entries of committed tokens, every layer.

        The last layer's are written without its attention and MLP: nothing but a draft needs its output, and
        ``propose`` computes that from the entry itself. The last entry of a page leaves its boundary hidden
        states, too.
        """
        module, pages, slots = self.module, own.pages, own.slots
        merged, cache = [module.fuse(params, on, seen.features)], list(pages.cache)
        last, size = len(cache) - 1, cache[0].page_size

        def rows(k: int) -> Pass:
            hidden = jnp.concatenate([slots.pending[:, k : k + 1], merged[k][:, :-1]], axis=1)
            written, visible = draft_module.existing(k, seen.positions), draft_module.seen(k, seen.positions)
            view = PagedView(seen.page_table, written, visible, seen.form)
            return Pass(seen.tokens, hidden, seen.positions, (view,))

        for k in range(last):
            z, cache[k], *_ = draft_module.run(module, params, on, k, rows(k), cache[k])
            merged.append(z)
        cache[last] = draft_module.write_cache(module, params, on, last, rows(last), cache[last])
        stacked = jnp.stack(merged, axis=2)
        full = jnp.where(seen.positions % size == size - 1, seen.positions // size, -1)
        states = stacked.reshape(*seen.tokens.shape, -1)
        boundary = on.write(pages.boundary, states, seen.page_table, full)
        pending = seen.last(stacked, slots.pending)
        return DrafterState(slots.replace(pending=pending), RecursivePages(tuple(cache), boundary))


class _Ahead(struct.PyTreeNode):
    """Results of drafting passes.

    Attributes:
        z: outputs of the last layer that ran, of the rows that the next one merges.
        cache: every layer's entries.
        choice: rows for sparse attention.
    """

    made: Made
    z: Float[Array, "B w D"]
    cache: tuple[LayerCache, ...]
    choice: Choice = ()


@dataclass(frozen=True)
class _Passes:
    """The passes of one step, through one layer each; see ``Recursive.propose``."""

    module: DraftModule
    on: Backend
    params: Params
    s: Slots
    rules: DraftRules
    pending: Float[Array, "B k D"]

    @property
    def share(self) -> bool:
        """Whether drafts attend to the choice of the first one. They do not see each other then."""
        indexer = self.module.cfg.indexer
        return indexer is not None and indexer.share_drafts

    def start(self, cache: tuple[LayerCache, ...]) -> _Ahead:
        """The results before the first pass: no drafts yet."""
        made = Made.nothing(self.s, self.rules, self.module.trunk.vocab_size)
        return _Ahead(made, self.pending[:, :1], cache)

    def draft(self, k: Int[Array, ""] | int, ahead: _Ahead) -> _Ahead:
        """Draft ``k``, from 0. It is an array only where all passes run one layer over one row per slot."""
        module, params, on = self.module, self.params, self.on
        cache, layers = list(ahead.cache), len(ahead.cache)
        layer, z, first = k % layers if isinstance(k, int) else 0, ahead.z[:, -1:], None
        if isinstance(k, int) and 0 < k < layers:  # over the rows of the newest token and of every draft
            z, first = jnp.concatenate([self.pending[:, k : k + 1], ahead.z], axis=1), 0
            if layer == min(layers, self.rules.depth) - 1:
                # No layer behind it needs the results of the first rows.
                before = self.rows(k, ahead, z[:, :-1], first)
                cache[layer] = draft_module.write_cache(module, params, on, layer, before, cache[layer])
                z, first = z[:, -1:], None
        given = self.rows(k, ahead, z, first)
        z, cache[layer], _, found = draft_module.run(module, params, on, layer, given, cache[layer])
        with jax.named_scope("draft_sample"):
            logits = module.logits(params, layer, z[:, -1], on)
        made = ahead.made.drawn(k, logits, self.s, self.rules)
        return _Ahead(made, z.astype(ahead.z.dtype), tuple(cache), found if self.share else ())

    def rows(
        self, k: Int[Array, ""] | int, ahead: _Ahead, z: Float[Array, "B w D"], first: int | None
    ) -> Pass:
        """Rows of the pass for draft ``k`` that merge ``z``: from token ``first`` of the window; None: k."""
        s, at = self.s, k if first is None else first
        tokens = jax.lax.dynamic_slice_in_dim(ahead.made.tokens, at, z.shape[1], axis=1)
        positions = s.length[:, None] + at + jnp.arange(z.shape[1])
        drafting = s.active & (k < s.depth)
        written = jnp.where(drafting[:, None], positions, -1)
        if first is None:
            step, layers = 0 if self.share else k, len(ahead.cache)
            visible = draft_module.seen_by_draft(step, layers, s.length, drafting)
        else:
            assert isinstance(k, int), "passes over several rows differ"
            written, visible = draft_module.existing(k, written), draft_module.seen(k, written)
        return Pass(tokens, z, positions, (PagedView(s.page_table, written, visible),), ahead.choice)


def _deferred(slots: RecursiveSlots, seen: Committed) -> RecursiveSlots:
    """The slots with one more deferred token each where ``count`` is 1."""
    here = jnp.arange(slots.tokens.shape[1]) == slots.count[:, None]
    known = zip(seen.features, slots.features, strict=True)
    return slots.replace(
        tokens=jnp.where(here, seen.tokens, slots.tokens),
        features=tuple(jnp.where(here[..., None], new, old) for new, old in known),
        count=slots.count + seen.count,
    )
