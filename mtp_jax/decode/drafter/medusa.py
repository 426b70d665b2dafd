"""Medusa heads (``model.medusa``) as a drafter: each draft depends on one hidden state of the trunk alone.

That state is the last committed token's, which is pending from one step to the next. Nothing is cached. A
sequence that begins with cached pages computes its last token anew, so no page keeps a hidden state.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.protocol import FINAL, Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.medusa import MedusaHeads
from mtp_jax.model.params import Params, type_of


@dataclass(frozen=True)
class Medusa:
    """Drafts from one head each."""

    module: MedusaHeads
    features: tuple[int, ...] = (FINAL,)
    deferral: int = 0

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No hidden state is pending; pages have no part."""
        pending = (shape.slots, 1, self.module.trunk.hidden_size)
        return DrafterState(jnp.zeros(pending, type_of[shape.dtype]), ())

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot; no head is computed whose draft is not wanted."""
        module = self.module

        def logits(k: Int[Array, ""] | int, _: Int[Array, " B"]) -> Float[Array, "B V"]:
            return module.logits(params, on, own.slots, k)[:, 0]

        return chains(s, rules, on, module.trunk.vocab_size, logits), own

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
