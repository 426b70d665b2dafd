"""Drafts that are drawn one after the other, from logits that need no pass after the draft before them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import Source
from mtp_jax.decode.state import Slots
from mtp_jax.model.backend import Backend

Logits = Callable[[Int[Array, ""] | int, Int[Array, " B"]], Float[Array, "B V"]]
"""The logits of draft k, the first being draft 0, after the token before it."""


class _Made(struct.PyTreeNode):
    """Drafts so far: the newest token and the drafts, their distributions, logits and margins."""

    tokens: Int[Array, "B W"]
    probs: Float[Array, "B K V"] | None
    logits: Float[Array, "B K V"] | None
    margins: Float[Array, "B K"] | None


def chains(
    s: Slots, rules: DraftRules, on: Backend, vocab: int, logits: Logits, source: Source = Source.NEXTN
) -> Drafts:
    """A chain of every slot. vocab: tokens of the trunk. source: of the drafts, for counts and estimates."""
    depth = rules.depth
    tokens = jnp.pad(s.newest[:, None], ((0, 0), (0, depth)))
    scores = jnp.zeros((len(tokens), depth, vocab), jnp.float32)
    probs, kept = (scores if wanted else None for wanted in (rules.drafting, rules.logits))

    def draft(k: Int[Array, ""] | int, made: _Made) -> _Made:
        before = jax.lax.dynamic_index_in_dim(made.tokens, k, axis=1, keepdims=False)
        chosen_by = logits(k, before)
        token, q = rules.draw(chosen_by, s, made.tokens, k)

        def put(a: Any, new: Any, at: Any) -> Any:
            return a if a is None else jax.lax.dynamic_update_slice_in_dim(a, new[:, None], at, axis=1)

        tokens, probs = put(made.tokens, token, k + 1), put(made.probs, q, k)
        margins = put(made.margins, rules.margin(chosen_by), k)
        return _Made(tokens, probs, put(made.logits, chosen_by, k), margins)

    margins = jnp.zeros((len(tokens), depth), jnp.float32) if rules.margins else None
    made = on.repeated(0, depth, rules.wanted, draft, _Made(tokens, probs, kept, margins))
    count = jnp.full_like(s.length, rules.wanted)
    of = jnp.full_like(count, source)
    return Drafts(made.tokens[:, 1:], count, of, made.logits, made.probs, margins=made.margins)
