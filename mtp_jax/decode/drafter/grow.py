"""Trees of drafts, grown by a draft module of one layer as EAGLE-2 does (arXiv 2406.16858, section 4).

The newest token gets k children, the k likeliest tokens behind it. Step by step the k best nodes of the step
before, the beams, get k children each. A node's score is the product of the probabilities on its way. The
best of all these candidates are the tree, in the order in which they were found, which is SGLang's. A score
is not above the parent's, and the first of equals is the better one, so a tree with a node has its parent.

The row of a beam is written behind the newest token's, past the committed length, and sees the rows on its
way alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import Origin, TreeShape
from mtp_jax.decode.sampling import NO_TOKEN
from mtp_jax.decode.state import Slots
from mtp_jax.decode.tree import along
from mtp_jax.model import draft_module
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.draft_module import DraftModule, Pass
from mtp_jax.model.indexer import Choice
from mtp_jax.model.params import Params
from mtp_jax.model.visible import Window


class Candidates(struct.PyTreeNode):
    """Nodes that a tree may have, parents first.

    Attributes:
        tokens: NO_TOKEN where there is none.
        scores: -1 where no step has found any.
        parents: the candidate that each one follows; -1: the newest token.
    """

    tokens: Int[Array, "B C"]
    scores: Float[Array, "B C"]
    parents: Int[Array, "B C"]

    def best(self, nodes: int, count: Int[Array, " B"]) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
        """The ``count`` best of each row as a tree, padded to ``nodes`` drafts: (tokens, parents)."""
        last = self.scores.shape[1]
        ranked = jax.lax.top_k(self.scores, nodes)[1]  # the first among equals
        kept = jnp.sort(jnp.where(jnp.arange(nodes) < count[:, None], ranked, last), axis=1)
        there, at = kept < last, jnp.minimum(kept, last - 1)
        parents = along(at, self.parents)
        numbers = 1 + jnp.sum(kept[:, None] < parents[..., None], axis=2)
        return along(at, self.tokens), jnp.where(there & (parents >= 0), numbers, 0)


class _Grown(struct.PyTreeNode):
    """Candidates so far, and the beams.

    Attributes:
        rows: the newest token and the beams of every step.
        z: the states fed back by the beams' parents, which the beams merge.
        lineage: rows on the way to each beam, its own not yet (see ``tree``).
        scores: scores of the beams.
        numbers: the beams' places among the candidates.
        choice: rows for sparse attention, if the first pass chose them.
    """

    rows: Int[Array, "B W"]
    z: Float[Array, "B k D"]
    lineage: Int[Array, "B k"]
    scores: Float[Array, "B k"]
    numbers: Int[Array, "B k"]
    found: Candidates
    cache: LayerCache
    choice: Choice = ()


@dataclass(frozen=True)
class GrownTrees:
    """The trees of one step."""

    module: DraftModule
    params: Params
    on: Backend
    s: Slots
    rules: DraftRules
    shape: TreeShape

    def grow(self, pending: Float[Array, "B one D"], cache: LayerCache) -> tuple[Drafts, LayerCache]:
        """A tree of every slot. pending: the state that the newest token's entry merges."""
        shape, s, wanted = self.shape, self.s, self.rules.wanted
        grown = self._root(pending, cache)
        # A tree of n drafts has no more than n steps.
        grown = self.on.repeated(1, shape.steps, jnp.minimum(wanted, shape.steps), self._step, grown)
        count = jnp.full_like(s.length, wanted)
        tokens, parents = grown.found.best(self.rules.depth, jnp.minimum(count, s.depth))
        source = jnp.full_like(count, Origin.NEXTN)
        return Drafts(tokens, count, source, None, None, parents), grown.cache

    def _root(self, pending: Float[Array, "B one D"], cache: LayerCache) -> _Grown:
        """The children of the newest token."""
        k, newest = self.shape.topk, self.s.newest[:, None]
        none = jnp.zeros_like(newest)
        first = self._rows(0, newest, pending, none, none, ())
        z, cache, choice = self._run(first, cache)
        rows = jnp.pad(newest, ((0, 0), (0, self.shape.steps * k)))
        tokens, scores = (a[:, 0] for a in self._children(0, z, rows, none))

        def filled(new: Array, padding: Any) -> Array:
            return jnp.pad(new, ((0, 0), (0, self.shape.rows * k)), constant_values=padding)

        parents = jnp.full_like(tokens, -1)
        found = Candidates(filled(tokens, NO_TOKEN), filled(scores, -1), filled(parents, -1))
        rows = jax.lax.dynamic_update_slice_in_dim(rows, tokens, 1, axis=1)
        numbers = jnp.broadcast_to(jnp.arange(k), tokens.shape)
        z, lineage = jnp.repeat(z, k, axis=1).astype(pending.dtype), jnp.repeat(none, k, axis=1)
        kept = tuple(c if c is None else jnp.repeat(c, k, axis=1) for c in choice) if self._share else ()
        return _Grown(rows, z, lineage, scores, numbers, found, cache, kept)

    def _step(self, i: Int[Array, ""] | int, grown: _Grown) -> _Grown:
        """The children of the beams of step ``i``, and the next beams."""
        k, first = self.shape.topk, 1 + (i - 1) * self.shape.topk
        own = first + jnp.arange(k)
        lineage = grown.lineage | (1 << (own - 1))
        tokens = jax.lax.dynamic_slice_in_dim(grown.rows, first, k, axis=1)
        written = jnp.broadcast_to(own, tokens.shape)
        beams = self._rows(i, tokens, grown.z, written, lineage, grown.choice)
        z, cache, _ = self._run(beams, grown.cache)
        after, probs = self._children(i, z, grown.rows, lineage)
        scores = (grown.scores[..., None] * probs).reshape(len(tokens), -1)
        after, parents = after.reshape(scores.shape), jnp.repeat(grown.numbers, k, axis=1)
        begin = k + (i - 1) * k * k

        def put(a: Array, new: Array, at: Any) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(a, new, at, axis=1)

        new = Candidates(after, scores, parents)
        found = jax.tree.map(lambda a, b: put(a, b, begin), grown.found, new)
        scores, best = jax.lax.top_k(scores, k)
        rows, behind = put(grown.rows, along(best, after), first + k), best // k
        z = along(behind, z.astype(grown.z.dtype))
        return _Grown(rows, z, along(behind, lineage), scores, begin + best, found, cache, grown.choice)

    @property
    def _share(self) -> bool:
        """Whether drafts attend to the choice of the first one. They do not see each other then."""
        indexer = self.module.cfg.indexer
        return indexer is not None and indexer.share_drafts

    def _rows(
        self,
        i: Int[Array, ""] | int,
        tokens: Int[Array, "B n"],
        z: Float[Array, "B n D"],
        row: Int[Array, "B n"],
        lineage: Int[Array, "B n"],
        choice: Choice,
    ) -> Pass:
        """A pass over tokens that follow ``i`` drafts, in these rows behind the committed length."""
        s, length = self.s, self.s.length[:, None]
        drafting = s.active & (i < s.depth)
        seen = jnp.zeros_like(lineage) if self._share else lineage
        count = tokens.shape[1] * drafting.astype(jnp.int32)
        visible = Window(jnp.ones_like(s.length), s.length + 1, count, seen)
        view = PagedView(s.page_table, jnp.where(drafting[:, None], length + row, -1), visible)
        return Pass(tokens, z, jnp.broadcast_to(length + i, tokens.shape), (view,), choice)

    def _run(self, given: Pass, cache: LayerCache) -> tuple[Float[Array, "B n D"], LayerCache, Choice]:
        """The layer over these rows."""
        z, cache, _, choice = draft_module.run(self.module, self.params, self.on, 0, given, cache)
        return z, cache, choice

    def _children(
        self, i: Int[Array, ""] | int, z: Float[Array, "B n D"], rows: Array, lineage: Int[Array, "B n"]
    ) -> tuple[Int[Array, "B n k"], Float[Array, "B n k"]]:
        with jax.named_scope("draft_sample"):
            logits = self.module.logits(self.params, 0, z, self.on)
        known = rows[:, : 1 + self.shape.rows]  # no bit tells of the rows behind
        return self.rules.children(logits, self.s, known, lineage, i, self.shape.topk)
