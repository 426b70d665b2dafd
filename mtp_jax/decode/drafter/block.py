"""A head that drafts a whole block in one pass (``model.block``), as a drafter.

Its cache has the keys and values of committed tokens alone, so nothing is pending, no hidden state stands at
the end of a page, and a rejected block leaves nothing behind.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.protocol import Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import Source
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.block import Blocks
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.params import Params, type_of


class _Made(struct.PyTreeNode):
    """Drafts so far: the newest token and the drafts, their distributions, logits and margins."""

    tokens: Int[Array, "B W"]
    probs: Float[Array, "B K V"] | None
    logits: Float[Array, "B K V"] | None
    margins: Float[Array, "B K"] | None


@dataclass(frozen=True)
class Block:
    """Drafts from one pass over a block; each is drawn after the one before it."""

    module: Blocks
    deferral: int = 0

    @property
    def features(self) -> tuple[int, ...]:
        """The head's taps."""
        return self.module.head.taps

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No keys and values; a slot has nothing beside its pages."""
        cfg, kind = self.module.head.layers, type_of[shape.dtype]
        layers = range(cfg.num_hidden_layers)
        cache = (empty_cache(pages, shape.page_size, cfg, i, kind, fp8=shape.fp8) for i in layers)
        return DrafterState((), tuple(cache))

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot: the first rows of a whole block, however few are wanted."""
        module, depth, first = self.module, rules.depth, 0 if self.module.head.anchored else 1
        seen = module.seen(s.length, s.active)
        x = module.run(params, on, s.newest, seen, s.page_table, own.pages)
        z = module.normed(params, x[:, first : first + depth])
        with jax.named_scope("draft_sample"):
            logits = module.logits(params, on, z)
        tokens = jnp.pad(s.newest[:, None], ((0, 0), (0, depth)))
        scores = jnp.zeros((len(tokens), depth, module.trunk.vocab_size), jnp.float32)
        probs, kept = (scores if wanted else None for wanted in (rules.drafting, rules.logits))

        def draft(k: Int[Array, ""] | int, made: _Made) -> _Made:
            row, states, before = (
                jax.lax.dynamic_index_in_dim(a, k, axis=1, keepdims=False) for a in (logits, z, made.tokens)
            )
            with jax.named_scope("draft_sample"):
                chosen_by = module.after(params, states, row, before)
            token, q = rules.draw(chosen_by, s, made.tokens, k)

            def put(a: Any, new: Any, at: Any) -> Any:
                return a if a is None else jax.lax.dynamic_update_slice_in_dim(a, new[:, None], at, axis=1)

            tokens, probs = put(made.tokens, token, k + 1), put(made.probs, q, k)
            margins = put(made.margins, rules.margin(chosen_by), k)
            return _Made(tokens, probs, put(made.logits, chosen_by, k), margins)

        margins = jnp.zeros((len(tokens), depth), jnp.float32) if rules.margins else None
        made = on.repeated(0, depth, rules.wanted, draft, _Made(tokens, probs, kept, margins))
        count = jnp.full_like(s.length, rules.wanted)
        source = jnp.full_like(count, Source.NEXTN)
        drafts = Drafts(made.tokens[:, 1:], count, source, made.logits, made.probs, margins=made.margins)
        return drafts, own

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Write the keys and values of these tokens."""
        context = self.module.context(params, on, seen.features)
        written = self.module.write(params, on, context, seen.positions, seen.page_table, own.pages)
        return own.replace(pages=written)

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Nothing is ever deferred."""
        return own

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """The pages have all that there is."""
        return own
