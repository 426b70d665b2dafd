"""How a drafter that has logits draws its drafts: by the transforms that the target's tokens go through."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode.keys import Drafting
from mtp_jax.decode.sampling import (
    Purpose,
    adjust,
    argmax,
    distribution,
    gumbel_sample,
    restrict,
    row_keys,
    sample,
)
from mtp_jax.decode.state import Slots


class DraftSampler(struct.PyTreeNode):
    """The rules of one step's drafts.

    Attributes:
        allowed: what grammars allow at each position, as far as that is known before there are drafts (see
            ``restrict``).
        drafting: None for steps in which every row is greedy.
        coupled: draw with the numbers that ``verify.coupled`` draws the target's tokens with.
    """

    allowed: UInt32[Array, "B W words"] | None = None
    drafting: Drafting | None = struct.field(pytree_node=False, default=None)
    coupled: bool = struct.field(pytree_node=False, default=False)

    def counts(self, s: Slots) -> Int[Array, "B V"] | None:
        """The output tokens before the first draft, for ``draw``."""
        return None if self.drafting is None else s.sampling.counts

    @jax.named_scope("draft_sample")
    def draw(
        self, logits: Float[Array, "B V"], s: Slots, counts: Int[Array, "B V"] | None, k: int
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None, Int[Array, "B V"] | None]:
        """Draft ``k`` of every slot. Returns (tokens, the distribution they come from, counts with them).

        That is None in greedy steps, and a point mass where drafting is greedy.
        """
        here = None if self.allowed is None else self.allowed[:, k : k + 1]
        if self.drafting is None or counts is None:
            return argmax(restrict(logits[:, None], here))[:, 0], None, None
        generated = (s.generated + k)[:, None]
        adjusted = adjust(logits[:, None], s.sampling, counts[:, None], generated, here)
        token, q = self._choose(adjusted, s, self.drafting, k)
        at = (jnp.arange(token.shape[0]), jnp.where(token < 0, counts.shape[1], token))
        return token, q, counts.at[at].add(1, mode="drop")

    def _choose(
        self, logits: Float[Array, "B one V"], s: Slots, drafting: Drafting, k: int
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        if drafting == "greedy":
            cold = replace(s.sampling, temperature=jnp.zeros_like(s.sampling.temperature))
            q = distribution(logits, cold)[:, 0]
            return argmax(q), q
        q = distribution(logits, s.sampling)[:, 0]
        if self.coupled:
            return gumbel_sample(row_keys(s.sampling.seed, s.length + k, Purpose.SAMPLE), q), q
        return sample(row_keys(s.sampling.seed, s.length, Purpose.DRAFT + k), q), q
