"""The chunk of a step: rows in every cache, and the first token of each prompt that ends.

A preempted request prefills its prompt and output but the newest token, which is not emitted again.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.arrays import Chunk, TopLogprobs
from mtp_jax.decode.keys import Finish
from mtp_jax.decode.part import Outputs, Part, PartRows
from mtp_jax.decode.result import Emitted, StepResult, pack
from mtp_jax.decode.sampling import (
    Purpose,
    adjust,
    count_tokens,
    distribution,
    row_keys,
    sample,
    top_logprobs,
)
from mtp_jax.decode.state import Slots, State, take_slots
from mtp_jax.model import trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import PagedView
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Model
from mtp_jax.model.visible import chain

# Declared without jax, which flax imports: not by `flax.struct`.
jax.tree_util.register_dataclass(Chunk)


@dataclass(frozen=True)
class Prompts(Part):
    """The chunk of a step."""

    chunk: Chunk

    @property
    def greedy(self) -> bool:
        """A prompt may draw its first token."""
        return False

    def scored(self, hidden: Float[Array, "G T D"]) -> Float[Array, "G one D"]:
        """The last real token of each prompt."""
        last = jnp.maximum(self.chunk.count - 1, 0)[:, None, None]
        return jnp.take_along_axis(hidden, last, axis=1)

    def conclude(self, params: Params, state: State, out: Outputs) -> tuple[State, StepResult]:
        """Emit the first tokens of prompts that end."""
        assert out.logits is not None, "prompts read logits"
        chunk, count = self.chunk, self.key.prompt_logprobs
        with jax.named_scope("first_token"):
            after, emitted = self._first_tokens(out.hidden, out.logits)
        with jax.named_scope("prefill_drafter"):
            state = self.commit(params, state, self.rows.committed(out.features, chunk.count), after)
        none = jnp.zeros_like(emitted.count)
        asked = None if count is None else _scores(params, out.hidden, chunk, self.decoding.model.on, count)
        packed = pack(emitted, none, none, none)
        return state, StepResult(packed, self.top(out.logits, emitted), asked)

    def _first_tokens(
        self, hidden: Float[Array, "G T D"], logits: Float[Array, "G one V"]
    ) -> tuple[Slots, Emitted]:
        """The slots after the chunk, and the first tokens of prompts that end. logits: of last tokens."""
        s, chunk = self.rows.slots, self.chunk
        healthy = (jnp.isfinite(hidden).all(axis=-1) | (self.rows.view.written < 0)).all(axis=1)
        token, finish = _first_token(logits, s, chunk, healthy)
        fresh = (token >= 0) & (chunk.follows < 0)
        count = fresh.astype(jnp.int32)
        after = s.replace(
            length=chunk.start + chunk.count,
            newest=jnp.maximum(token, 0),
            active=(token >= 0) & (finish == Finish.RUNNING),
            remaining=s.remaining - count,
            generated=s.generated + count,
            sampling=count_tokens(s.sampling, jnp.where(fresh, token, -1)[:, None]),
        )
        return after, Emitted(token[:, None], count, finish)


def rows_of(state: State, chunk: Chunk, pages: int, model: Model) -> PartRows:
    """The chunk's tokens, padding included."""
    s = take_slots(state.slots, chunk.slot)
    index = jnp.arange(chunk.tokens.shape[1])
    positions = chunk.start[:, None] + index
    written = jnp.where(index < chunk.count[:, None], positions, -1)
    form = model.on.kind(model.cfg).prefill_form(model.cfg, chunk.tokens.shape[1])
    visible = chain(chunk.start, chunk.count)
    view = PagedView(s.page_table[:, :pages], written, visible, form, slot=chunk.slot)
    return PartRows(chunk.slot, s, chunk.tokens, positions, view)


@jax.named_scope("prompt_logprobs")
def _scores(
    params: Params, hidden: Float[Array, "G T D"], chunk: Chunk, on: Backend, count: int
) -> TopLogprobs:
    """Log-probabilities of a chunk's tokens; where no prompt wants any, numbers without meaning."""

    def scored() -> TopLogprobs:
        return top_logprobs(trunk.logits(params, hidden, on), chunk.targets, count)

    def none() -> TopLogprobs:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(scored))

    return jax.lax.cond(jnp.any(chunk.targets >= 0), scored, none)


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
