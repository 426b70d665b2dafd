"""Drafts that are drawn one after the other, from logits that need no pass after the draft before them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import Origin
from mtp_jax.decode.state import Slots
from mtp_jax.model.backend import Backend

Logits = Callable[[Int[Array, ""] | int, Int[Array, " B"]], Float[Array, "B V"]]
"""The logits of draft k, the first being draft 0, after the token before it."""


class Made(struct.PyTreeNode):
    """The newest token of every slot and its drafts so far; 0 where none has been drawn.

    Attributes:
        probs, logits, margins: see ``Drafts``; None unless the rules ask for them.
    """

    tokens: Int[Array, "B W"]
    probs: Float[Array, "B K V"] | None
    logits: Float[Array, "B K V"] | None
    margins: Float[Array, "B K"] | None

    @classmethod
    def nothing(cls, s: Slots, rules: DraftRules, vocab: int) -> "Made":
        """No drafts yet. vocab: tokens of the trunk."""
        tokens = jnp.pad(s.newest[:, None], ((0, 0), (0, rules.depth)))
        scores = jnp.zeros((len(tokens), rules.depth, vocab), jnp.float32)
        probs, logits = (scores if wanted else None for wanted in (rules.drafting, rules.logits))
        margins = jnp.zeros((len(tokens), rules.depth), jnp.float32) if rules.margins else None
        return cls(tokens, probs, logits, margins)

    def drawn(
        self, k: Int[Array, ""] | int, logits: Float[Array, "B V"], s: Slots, rules: DraftRules
    ) -> "Made":
        """Draw draft k, the first being draft 0, from its logits."""
        token, q = rules.draw(logits, s, self.tokens, k)

        def put(a: Any, new: Any, at: Any) -> Any:
            return a if a is None else jax.lax.dynamic_update_slice_in_dim(a, new[:, None], at, axis=1)

        tokens, probs = put(self.tokens, token, k + 1), put(self.probs, q, k)
        margins = put(self.margins, rules.margin(logits), k)
        return Made(tokens, probs, put(self.logits, logits, k), margins)

    def drafts(self, s: Slots, rules: DraftRules, origin: Origin = Origin.NEXTN) -> Drafts:
        """A chain of every slot."""
        count = jnp.full_like(s.length, rules.wanted)
        source = jnp.full_like(count, origin)
        return Drafts(self.tokens[:, 1:], count, source, self.logits, self.probs, margins=self.margins)


def chains(
    s: Slots, rules: DraftRules, on: Backend, vocab: int, logits: Logits, origin: Origin = Origin.NEXTN
) -> Drafts:
    """A chain of every slot. vocab: tokens of the trunk. origin: of the drafts, for counts and estimates."""

    def draft(k: Int[Array, ""] | int, made: Made) -> Made:
        before = jax.lax.dynamic_index_in_dim(made.tokens, k, axis=1, keepdims=False)
        return made.drawn(k, logits(k, before), s, rules)

    made = on.repeated(0, rules.depth, rules.wanted, draft, Made.nothing(s, rules, vocab))
    return made.drafts(s, rules, origin)
