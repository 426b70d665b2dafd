"""Prefill: chunks of prompts, as many per data shard, into the cache; the last chunk emits the first token.

The prompt of a request that was preempted is all that it had; its last token is known and only resumed from.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.drafter.protocol import Committed, Drafter
from mtp_jax.decode.host import Chunk, TopLogprobs
from mtp_jax.decode.keys import Finish
from mtp_jax.decode.result import Emitted, StepResult, pack
from mtp_jax.decode.sampling import Purpose, adjust, distribution, row_keys, sample, top_logprobs
from mtp_jax.decode.state import DrafterState, Slots, State, put_slots, take_slots
from mtp_jax.decode.step import count_tokens, features_of
from mtp_jax.model import trunk
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend
from mtp_jax.model.visible import chain

jax.tree_util.register_dataclass(Chunk)


class PrefillResult(struct.PyTreeNode):
    """``first``: a StepResult of width 1, count 0 unless a token was emitted. ``prompt``: [G, T]."""

    first: StepResult
    prompt: TopLogprobs | None


def prefill(
    params: Params,
    state: State,
    chunk: Chunk,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    pages: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    on: Backend,
) -> tuple[State, PrefillResult]:
    """Write the chunk's rows in every cache; the last one emits the first token."""
    s = take_slots(state.slots, chunk.slot)
    table = s.page_table[:, :pages]
    index = jnp.arange(chunk.tokens.shape[1])
    valid = index < chunk.count[:, None]
    real = chunk.start[:, None] + index
    positions = jnp.where(valid, real, -1)
    with jax.named_scope("prefill_trunk"):
        view = PagedView(table, positions, chain(chunk.start, chunk.count))
        traced = trunk.run(params, cfg, chunk.tokens, real, state.trunk, view, on)
    hidden = traced.hidden
    last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    with jax.named_scope("prefill_drafter"):
        before = state.drafter.replace(slots=take_slots(state.drafter.slots, chunk.slot))
        seen = Committed(chunk.tokens, positions, features_of(drafter, traced), chunk.count)
        own = drafter.observe(params, before, s, table, seen, on, defer=False)
        kept = put_slots(state.drafter.slots, chunk.slot, own.slots, before.slots)
    with jax.named_scope("first_token"):
        logits = trunk.logits(params, jnp.take_along_axis(hidden, last, axis=1))
        healthy = (jnp.isfinite(hidden).all(axis=-1) | ~valid).all(axis=1)
        token, finish = _first_token(logits, s, chunk, healthy)
    fresh = (token >= 0) & (chunk.follows < 0)
    emitted = fresh.astype(jnp.int32)
    new = s.replace(
        length=chunk.start + chunk.count,
        newest=jnp.maximum(token, 0),
        active=(token >= 0) & (finish == Finish.RUNNING),
        remaining=s.remaining - emitted,
        generated=s.generated + emitted,
        sampling=count_tokens(s, jnp.where(fresh, token, -1)[:, None]),
    )
    slots = put_slots(state.slots, chunk.slot, new)
    zero = jnp.zeros_like(token)
    packed = pack(Emitted(token[:, None], emitted, finish), zero, zero, zero)
    top = None if logprobs is None else top_logprobs(logits, token[:, None], logprobs)
    prompt = None
    if prompt_logprobs is not None:
        with jax.named_scope("prompt_logprobs"):
            prompt = top_logprobs(trunk.logits(params, hidden), chunk.targets, prompt_logprobs)
    new_state = State(traced.caches, slots, DrafterState(kept, own.pages))
    return new_state, PrefillResult(StepResult(packed, top), prompt)


def _first_token(
    logits: Float[Array, "G one V"], s: Slots, chunk: Chunk, healthy: Bool[Array, " G"]
) -> tuple[Int[Array, " G"], Int[Array, " G"]]:
    """The token after a final chunk. Returns (token or -1, Finish)."""
    counts, allowed = s.sampling.counts[:, None], chunk.allowed[:, None]
    adjusted = adjust(logits, s.sampling, counts, s.generated[:, None], allowed)
    probs = distribution(adjusted, s.sampling)[:, 0]
    keys = row_keys(s.sampling.seed, chunk.start + chunk.count - 1, Purpose.SAMPLE)
    token = sample(keys, probs)
    some, known = chunk.count > 0, chunk.follows >= 0
    final = chunk.final & some
    token = jnp.where(known, chunk.follows, token)
    broken = some & ~healthy | final & ~(jnp.isfinite(logits).all(axis=(1, 2)) & (token >= 0))
    token = jnp.where(final & ~broken, token, -1)
    stop = ~known & jnp.take_along_axis(s.sampling.stop_mask, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
    finish = jnp.select(
        [broken, (token >= 0) & stop, (token >= 0) & ~known & (s.remaining <= 1)],
        [Finish.NAN, Finish.STOP, Finish.LENGTH],
        Finish.RUNNING,
    )
    return token, finish.astype(jnp.int32)
