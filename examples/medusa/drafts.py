"""Medusa heads: arXiv 2401.10774, section 2.1.1.

Head k predicts the token k + 2 places behind a token from the trunk's hidden state there, after the final
norm: the logits behind the hidden state give the next token, and the heads draft the tokens behind that one.
A head knows nothing of the tokens between.

The hidden state is the last committed token's, which is pending from one step to the next. Nothing is cached.
A sequence that begins with cached pages computes its last token anew, so no page keeps a hidden state.

A tree is given by the ranks on the way to every node (arXiv 2401.10774, section 2.1.2): the tokens of a step
are the likeliest tokens of its head, under every parent alike.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.protocol import FINAL, Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import NodePath, Origin, TreeShape
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params, type_of

from .declared import MedusaConfig, MedusaTree


@dataclass(frozen=True)
class MedusaHeads:
    """The heads of a trunk. Hashable."""

    trunk: ModelConfig

    @property
    def head(self) -> MedusaConfig:
        """Number and options of the heads."""
        assert isinstance(self.trunk.drafter, MedusaConfig), "the trunk has no Medusa heads"
        return self.trunk.drafter

    def logits(
        self, params: Params, on: Backend, hidden: Float[Array, "B W D"], k: Int[Array, ""] | int
    ) -> Float[Array, "B W V"]:
        """Logits of draft k, the first being draft 0; other heads are not computed."""
        if isinstance(k, int):
            return self._of_head(params, on, k, hidden)
        each = [partial(self._of_head, params, on, i) for i in range(self.head.heads)]
        return jax.lax.switch(k, each, hidden)

    def _of_head(
        self, params: Params, on: Backend, i: int, x: Float[Array, "B W D"]
    ) -> Float[Array, "B W V"]:
        assert isinstance(params.drafter, MedusaTree), "the configuration has heads, the parameters have none"
        blocks, table = params.drafter.residual[i], params.drafter.tables[i]
        with jax.named_scope(f"medusa_{i}"):
            for block in blocks:
                y = on.products.linear(x, block.linear)
                x = x + jax.nn.silu(y if block.bias is None else y + block.bias)
            return on.products.head(x, table)


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
        return Drafts(tokens, count, jnp.full_like(count, Origin.NEXTN), None, None, parents)

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


def drafter(trunk: ModelConfig, tree: TreeShape | None = None) -> Medusa:
    """Drafts with the heads. tree: the tree that is given; None: chains."""
    return Medusa(MedusaHeads(trunk), tree)
