"""Drafts that a step keeps: the verifier of its mode, and the target's own token behind a law's drafts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode import verify
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.keys import SamplingMode
from mtp_jax.decode.sampling import (
    Purpose,
    adjust,
    argmax,
    count_tokens,
    distribution,
    draws,
    likeliest,
    restrict,
    row_keys,
    window_counts,
)
from mtp_jax.decode.state import Slots
from mtp_jax.decode.verify import Verdict
from mtp_jax.errors import ConfigError


def num_drafts(s: Slots, drafts: Drafts) -> Int[Array, " B"]:
    """The number of drafts that each row verifies."""
    return jnp.minimum(s.depth, drafts.count)


def accept_drafts(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: UInt32[Array, "B W words"] | None,
) -> Verdict:
    """Which drafts each row keeps, and the token after them. Raises ConfigError."""
    count = num_drafts(s, drafts)
    if mode.drafting is None:
        return verify.greedy(argmax(restrict(logits, allowed)), drafts.tokens, count, drafts.parents)
    if drafts.parents is not None and mode.verifier != "coupled":
        raise ConfigError(
            f"verifier = {mode.verifier!r} for a tree of drafts; sampled trees are verified by 'coupled'"
        )
    counts = window_counts(s.sampling.counts, window, lineage=drafts.lineage)
    generated = s.generated[:, None] + drafts.steps
    adjusted, probs = adjust(logits, s.sampling, counts, generated, allowed), drafts.probs

    def sampled() -> Verdict:
        target = distribution(adjusted, s.sampling)
        if mode.verifier == "coupled" or probs is None:
            positions = s.length[:, None] + drafts.steps
            keys = jax.vmap(row_keys, (None, 1, None), 1)(s.sampling.seed, positions, Purpose.SAMPLE)
            return verify.coupled(keys, target, drafts.tokens, count, drafts.parents)
        accept = row_keys(s.sampling.seed, s.length, Purpose.ACCEPT)
        residual = row_keys(s.sampling.seed, s.length, Purpose.RESIDUAL)
        run = verify.block if mode.verifier == "block" else verify.rejection
        return run(accept, residual, target, probs, drafts.tokens, count)

    def likely() -> Verdict:
        return verify.greedy(likeliest(adjusted), drafts.tokens, count, drafts.parents)

    return jax.lax.cond(draws(s.sampling), sampled, likely)


def token_after(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    kept: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The target's own token after the first ``kept`` drafts, as a step without drafts chooses it there."""
    at, told = kept[:, None], jnp.arange(drafts.tokens.shape[1])
    counted = count_tokens(s.sampling, jnp.where(told < at, drafts.tokens, -1))
    there = s.replace(length=s.length + kept, generated=s.generated + kept, sampling=counted)
    none = drafts.replace(
        tokens=drafts.tokens[:, :0],
        count=jnp.zeros_like(kept),
        probs=None if drafts.probs is None else drafts.probs[:, :0],
    )
    row = jnp.take_along_axis(logits, at[..., None], axis=1)
    return accept_drafts(row, jnp.take_along_axis(window, at, axis=1), none, there, mode, None).token
