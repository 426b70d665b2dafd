"""Medusa heads (``model.medusa``) as a drafter: each draft depends on one hidden state of the trunk alone.

That state is the last committed token's, which is pending from one step to the next. Nothing is cached. A
sequence that begins with cached pages computes its last token anew, so no page keeps a hidden state.

A tree is given by the ranks on the way to every node (arXiv 2401.10774, section 2.1.2): the tokens of a step
are the likeliest tokens of its head, under every parent alike.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.protocol import FINAL, Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import NodePath, Source, TreeShape
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.medusa import MedusaHeads
from mtp_jax.model.params import Params, type_of


@dataclass(frozen=True)
class Medusa:
    """Drafts from one head each, a chain of their likeliest tokens or a tree."""

    module: MedusaHeads
    tree: TreeShape | None = None
    features: tuple[int, ...] = (FINAL,)
    deferral: int = 0

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No hidden state is pending; pages have no part."""
        pending = (shape.slots, 1, self.module.trunk.hidden_size)
        return DrafterState(jnp.zeros(pending, type_of[shape.dtype]), ())

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot; no head is computed whose draft in a chain is not wanted.

        More drafts than the tree has steps are its first nodes.
        """
        module, tree = self.module, self.tree
        if tree and rules.depth > tree.steps and not rules.logits:
            return self._grown(params, own, s, rules, on, tree.ways[: rules.depth]), own

        def logits(k: Int[Array, ""] | int, _: Int[Array, " B"]) -> Float[Array, "B V"]:
            return module.logits(params, on, own.slots, k)[:, 0]

        return chains(s, rules, on, module.trunk.vocab_size, logits), own

    def _grown(
        self,
        params: Params,
        own: DrafterState,
        s: Slots,
        rules: DraftRules,
        on: Backend,
        ways: tuple[NodePath, ...],
    ) -> Drafts:
        """The tree of these nodes. Penalties know no draft, as a token has one rank under all parents."""
        newest, ranks = s.newest[:, None], 1 + max(map(max, ways))
        found = []
        for i in range(max(map(len, ways))):
            scores = self.module.logits(params, on, own.slots, i)
            tokens, _ = rules.children(scores, s, newest, jnp.zeros_like(newest), i, ranks)
            found.append(tokens[:, 0])
        numbers = {(): 0} | {way: 1 + i for i, way in enumerate(ways)}
        steps, ranks = (jnp.array(a) for a in zip(*((len(w) - 1, w[-1]) for w in ways), strict=True))
        tokens = jnp.stack(found, axis=1)[:, steps, ranks]
        parents = jnp.broadcast_to(jnp.array([numbers[way[:-1]] for way in ways]), tokens.shape)
        count = jnp.full_like(s.length, rules.wanted)
        return Drafts(tokens, count, jnp.full_like(count, Source.NEXTN), None, None, parents)

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Keep the hidden state of the last of these tokens."""
        (hidden,) = seen.features
        return own.replace(slots=seen.last(hidden[:, :, None].astype(own.slots.dtype), own.slots))

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Nothing is ever deferred."""
        return own

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """The next token that is computed brings its hidden state."""
        return own
