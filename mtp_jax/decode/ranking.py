"""Adaptive verification: a step verifies R drafts of all rows, the likeliest to be reached and accepted.

The chance that a draft survives is estimated from the margins, the gap between the two highest logits of each
draft up to it. A margin is known before its draft is drawn. Survival only falls along a row, so the best R
drafts are the first drafts of every row, and whether draft i is verified depends on the row's drafts before i
and on other rows alone. Every verifier stays exact under such a stopping time; it would not if the number
depended on the probability of the drawn token itself. Nor would it if two rows drew the same numbers: a
request with a seed of its own takes part only where the verifier is coupled, whose tokens no draft changes.

The packed pass (``model.parts.Packing``) computes the newest token of every slot and these R drafts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.state import Slots
from mtp_jax.model.parts import Packing


def survival(
    margins: Float[Array, "B K"], source: Int[Array, " B"], estimate: Float[Array, "s K two"]
) -> Float[Array, "B K"]:
    """The chance that each draft and all drafts before it are accepted.

    estimate: slope and bias, by ``Source`` and position, of the logit of a draft's acceptance after the
    drafts before it. A margin that is NaN, a broken drafter's, gives 0.
    """
    slope, bias = estimate[source, :, 0], estimate[source, :, 1]
    chance = jax.nn.sigmoid(slope * margins + bias)
    return jnp.cumprod(jnp.where(jnp.isnan(chance), 0, chance), axis=1)


def likeliest(
    drafts: Drafts, s: Slots, estimate: Float[Array, "s K two"], count: int, shards: int
) -> tuple[Drafts, Packing]:
    """The drafts with new counts, ``count`` together in each data shard, and the packing of their windows.

    Fewer drafts are kept where rows have fewer. A row keeps at most ``s.depth`` of them.
    """
    assert drafts.margins is not None, "drafts without margins cannot be ranked"
    slots, depth = drafts.tokens.shape
    most = jnp.where(s.active, jnp.minimum(s.depth, drafts.count), 0)
    chance = survival(drafts.margins, drafts.source, estimate)
    chance = jnp.where(jnp.arange(depth) < most[:, None], chance, -1)
    # Position by position: of equal chances the earlier draft of a row comes first.
    own = slots // shards
    by_position = chance.reshape(shards, own, depth).swapaxes(1, 2).reshape(shards, -1)
    best, index = jax.lax.top_k(by_position, count)
    position, slot = index // own, index % own
    mine = (slot[:, None] == jnp.arange(own)[:, None]) & (best >= 0)[:, None]
    kept = mine.sum(axis=2, dtype=jnp.int32).reshape(slots)
    newest = jnp.broadcast_to(jnp.arange(own), (shards, own))
    tokens = jnp.concatenate([newest * (depth + 1), slot * (depth + 1) + position + 1], axis=1)
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    where = jax.vmap(lambda at: jnp.zeros(own * (depth + 1), jnp.int32).at[at].set(rows))(tokens)
    return drafts.replace(count=kept), Packing(tokens, where.reshape(slots, depth + 1))
