"""A head that drafts a whole block in one pass (``model.block``), as a drafter.

Its cache has the keys and values of committed tokens alone, so nothing is pending, no hidden state stands at
the end of a page, and a rejected block leaves nothing behind.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.protocol import Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.block import Blocks
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.params import Params, type_of


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

        def after(k: Int[Array, ""] | int, before: Int[Array, " B"]) -> Float[Array, "B V"]:
            row, states = (jax.lax.dynamic_index_in_dim(a, k, axis=1, keepdims=False) for a in (logits, z))
            with jax.named_scope("draft_sample"):
                return module.after(params, states, row, before)

        return chains(s, rules, on, module.trunk.vocab_size, after), own

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
