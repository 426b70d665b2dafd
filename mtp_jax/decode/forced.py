"""Verdicts by a law (``decode/law.py``) in the place of the verifier's, which runs as always."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax.decode.keys import MAX_DRAFTS
from mtp_jax.decode.law import Law
from mtp_jax.decode.sampling import NO_TOKEN, Purpose, row_keys
from mtp_jax.decode.state import Slots
from mtp_jax.decode.verify import Verdict

# The last draft of a step draws with the number before this one (``Purpose``).
_PURPOSE = Purpose.DRAFT + MAX_DRAFTS


def kept(law: Law, s: Slots, drafts: Int[Array, "B K"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """Drafts that each row keeps, by its seed and its position alone.

    One number of a row decides for all its drafts: u < share i with that probability, and then u < all shares
    before it. Drafts past ``count`` are not kept, nor any from the first that is no token.
    """
    keys = row_keys(s.sampling.seed, s.length, _PURPOSE)
    drawn = jax.vmap(jax.random.uniform)(keys)[:, None]
    depth = drafts.shape[1]
    stays = (drawn < jnp.asarray(law.shares[:depth])) & (drafts >= 0) & (jnp.arange(depth) < count[:, None])
    return jnp.cumprod(stays, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def instead(real: Verdict, forced: Verdict) -> Verdict:
    """The forced verdict, of which the compiler cannot know that it needs no real one.

    No count or token is below NO_TOKEN. An optimization barrier would not do: XLA drops it on a CPU, and with
    it the verification, whose result no other code reads.
    """
    return jax.tree.map(lambda a, b: jnp.where(a < NO_TOKEN, a, b), real, forced)
