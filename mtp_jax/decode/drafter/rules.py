"""The rules of drafts. A drafter with logits draws by the transforms that the target's tokens go through."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode.keys import Drafting
from mtp_jax.decode.sampling import (
    NO_TOKEN,
    Purpose,
    adjust,
    argmax,
    distribution,
    draws,
    gumbel_sample,
    likeliest,
    perturbed,
    point_mass,
    restrict,
    row_keys,
    sample,
    window_counts,
)
from mtp_jax.decode.state import Slots


class DraftRules(struct.PyTreeNode):
    """The rules of one step's drafts.

    Attributes:
        depth: number of drafts that there is room for.
        wanted: number of drafts to make, which must be ``depth`` at most.
        allowed: tokens that grammars allow at each position, as far as known before there are drafts (see
            ``restrict``).
        drafting: None for steps in which every row is greedy.
        coupled: draw with the numbers that ``verify.coupled`` draws the target's tokens with.
        logits: whether the logits behind the drafts are handed on.
        margins: whether margins are handed on.
    """

    depth: int = struct.field(pytree_node=False)
    wanted: Int[Array, ""] | int
    allowed: UInt32[Array, "B W words"] | None = None
    drafting: Drafting | None = struct.field(pytree_node=False, default=None)
    coupled: bool = struct.field(pytree_node=False, default=False)
    logits: bool = struct.field(pytree_node=False, default=False)
    margins: bool = struct.field(pytree_node=False, default=False)

    def margin(self, logits: Float[Array, "B V"]) -> Float[Array, " B"] | None:
        """The gap between the two highest logits; None unless margins are handed on."""
        if not self.margins:
            return None
        best = argmax(logits)
        others = jnp.where(jnp.arange(logits.shape[-1]) == best[:, None], -jnp.inf, logits)
        return jnp.max(logits, axis=-1) - jnp.max(others, axis=-1)

    @jax.named_scope("draft_sample")
    def draw(
        self, logits: Float[Array, "B V"], s: Slots, window: Int[Array, "B W"], k: Int[Array, ""] | int
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
        """Draw draft k of every slot, the first being draft 0.

        window: the newest token and the drafts before draft k; tokens behind them are ignored. Returns (the
        drafts, the distribution that each was drawn from). The distribution is None in greedy steps, a point
        mass where drafting is greedy, and means nothing where no row samples (``draws``).
        """
        here = None if self.allowed is None else jax.lax.dynamic_slice_in_dim(self.allowed, k, 1, axis=1)
        if self.drafting is None:
            return argmax(restrict(logits[:, None], here))[:, 0], None
        counts = window_counts(s.sampling.counts, window, jnp.asarray(k, jnp.int32)[None])
        generated = (s.generated + k)[:, None]
        adjusted = adjust(logits[:, None], s.sampling, counts, generated, here)
        if self.drafting == "greedy":
            return likeliest(adjusted)[:, 0], point_mass(adjusted)[:, 0]

        def sampled() -> tuple[Array, Array]:
            q = distribution(adjusted, s.sampling)[:, 0]
            if self.coupled:
                return gumbel_sample(row_keys(s.sampling.seed, s.length + k, Purpose.SAMPLE), q), q
            return sample(row_keys(s.sampling.seed, s.length, Purpose.DRAFT + k), q), q

        def likely() -> tuple[Array, Array]:
            return likeliest(adjusted)[:, 0], jnp.zeros_like(logits)

        return jax.lax.cond(draws(s.sampling), sampled, likely)

    @jax.named_scope("draft_sample")
    def children(
        self,
        logits: Float[Array, "B n V"],
        s: Slots,
        rows: Int[Array, "B W"],
        lineage: Int[Array, "B n"],
        k: Int[Array, ""] | int,
        count: int,
    ) -> tuple[Int[Array, "B n c"], Float[Array, "B n c"]]:
        """The ``count`` best drafts after each of n nodes that follow ``k`` drafts: (tokens, probabilities).

        rows: the newest token and drafts; lineage: the drafts on the way to each node (see ``tree``). Greedy
        rows take the likeliest tokens. Rows that sample add the noise with which ``verify.coupled`` draws the
        target's token, so that the first child is the coupled draft of a chain, and a child counts the more
        the likelier it is with this noise. A token of probability 0 is NO_TOKEN.
        """
        here = None
        if self.allowed is not None:
            here = jax.lax.dynamic_slice_in_dim(self.allowed, k, 1, axis=1).repeat(lineage.shape[1], axis=1)
        if self.drafting is None:
            weights = restrict(logits, here)
        else:
            counts = window_counts(s.sampling.counts, rows, lineage=lineage)
            generated = jnp.broadcast_to((s.generated + k)[:, None], lineage.shape)
            weights = adjust(logits, s.sampling, counts, generated, here)
        if self.drafting == "sampled":
            adjusted = weights

            def sampled() -> Array:
                keys = row_keys(s.sampling.seed, s.length + k, Purpose.SAMPLE)[:, None]
                q = distribution(adjusted, s.sampling)
                noisy = perturbed(jnp.broadcast_to(keys, lineage.shape), q)
                return jnp.where((s.sampling.temperature > 0)[:, None, None], noisy, adjusted)

            weights = jax.lax.cond(draws(s.sampling), sampled, lambda: adjusted)
        probs, tokens = jax.lax.top_k(jax.nn.softmax(weights, axis=-1), count)
        there = probs > 0
        return jnp.where(there, tokens, NO_TOKEN), jnp.where(there, probs, 0)
