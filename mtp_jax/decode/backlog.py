"""NextN rows put off: only drafts read them, so steps without drafts leave theirs to one pass over many.

Step by step they were most of what a NextN layer cost where nothing is drafted.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.draft import extend
from mtp_jax.decode.state import Backlog, State
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend


def put_off(
    backlog: Backlog, tokens: Int[Array, " B"], hidden: Float[Array, "B D"], count: Int[Array, " B"]
) -> Backlog:
    """The backlog with one more token of each slot whose ``count`` is 1, and the trunk's hidden state of it.

    Without NextN layers there is no room for any.
    """
    here = jnp.arange(backlog.tokens.shape[1]) == backlog.count[:, None]
    return Backlog(
        jnp.where(here, tokens[:, None], backlog.tokens),
        jnp.where(here[..., None], hidden[:, None], backlog.hidden),
        backlog.count + count,
    )


def catch_up(params: Params, state: State, *, cfg: ModelConfig, on: Backend) -> State:
    """Write the NextN rows that were put off, and the tails of pages that they fill."""
    s, backlog = state.slots, state.backlog
    count = backlog.count[:, None]
    index = jnp.arange(backlog.tokens.shape[1])
    positions = jnp.where(index < count, s.length[:, None] - count + index, -1)
    with jax.named_scope("catch_up"):
        extension = extend(
            params,
            cfg,
            state.nextn,
            state.tails,
            s.page_table,
            backlog.tokens,
            positions,
            backlog.hidden,
            s.carry,
            on,
        )
        slots = replace(s, carry=extension.carry(backlog.count, s.carry))
    done = replace(backlog, count=jnp.zeros_like(backlog.count))
    return replace(state, nextn=extension.pages, tails=extension.tails, slots=slots, backlog=done)
