"""The drafter of a model that has none."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.decode.drafter.protocol import Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.params import Params


@dataclass(frozen=True)
class Nothing:
    """Never has a draft, and keeps nothing."""

    vocab: int
    features: tuple[int, ...] = ()
    deferral: int = 0

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No arrays."""
        return DrafterState((), ())

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Return ``rules.depth`` drafts, of which none counts."""
        tokens = jnp.zeros((len(s.length), rules.depth), jnp.int32)
        probs = None if rules.drafting is None else jnp.zeros((*tokens.shape, self.vocab), jnp.float32)
        none = jnp.zeros_like(s.length)
        margins = jnp.zeros(tokens.shape, jnp.float32) if rules.margins else None
        return Drafts(tokens, none, none, None, probs, margins=margins), own

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Nothing to remember."""
        return own

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Nothing is ever deferred."""
        return own

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """Nothing to go on from."""
        return own
