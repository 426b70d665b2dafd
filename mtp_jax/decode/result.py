"""The tokens that a step emits, and the one array in which the host reads them."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.arrays import TopLogprobs
from mtp_jax.decode.keys import Finish
from mtp_jax.decode.state import Slots
from mtp_jax.decode.tree import along
from mtp_jax.decode.verify import Verdict


class StepResult(struct.PyTreeNode):
    """Results of a step, which the host reads one step late.

    Attributes:
        packed: int32 [B, W + 5], a row for each window, then for each prompt of the chunk: emitted tokens (-1
            past the end), their count, accepted drafts, verified drafts, ``Finish``, ``Source`` of drafts.
            One array, because one copy is cheaper than several.
        logprobs: log-probabilities of the emitted tokens, if the step computes them.
        prompt: log-probabilities of the tokens of a chunk, if the step computes them.
        margins: margins of the windows' drafts, if the step hands them on (``Drafts.margins``).
    """

    packed: Int[Array, "B C"]
    logprobs: TopLogprobs | None
    prompt: TopLogprobs | None = None
    margins: Float[Array, "B K"] | None = None


def stack(results: list[StepResult]) -> StepResult:
    """The rows of one result, or of the windows and then of the chunk, whose one token is padded."""
    if len(results) == 1:
        return results[0]
    windows, chunk = results
    more = windows.packed.shape[1] - chunk.packed.shape[1]
    tokens, extra = chunk.packed[:, :1], chunk.packed[:, 1:]
    packed = jnp.concatenate([jnp.pad(tokens, ((0, 0), (0, more)), constant_values=-1), extra], axis=1)

    def below(a: Array, b: Array) -> Array:
        return jnp.concatenate([a, jnp.pad(b, ((0, 0), (0, more), *((0, 0),) * (b.ndim - 2)))])

    top = jax.tree.map(below, windows.logprobs, chunk.logprobs)
    return StepResult(jnp.concatenate([windows.packed, packed]), top, chunk.prompt, windows.margins)


class Emitted(struct.PyTreeNode):
    """Tokens that reach the output (-1 past the end), their count, and why the slot ends, if it does."""

    tokens: Int[Array, "B W"]
    count: Int[Array, " B"]
    finish: Int[Array, " B"]


def emit(verdict: Verdict, drafts: Int[Array, "B K"], s: Slots, healthy: Bool[Array, "B W"]) -> Emitted:
    """Cut the accepted tokens at the first stop token, at max_tokens, and before the first NaN."""
    width = drafts.shape[1] + 1
    if verdict.path is not None:
        healthy, drafts = along(verdict.path, healthy), along(jnp.maximum(verdict.path[:, 1:] - 1, 0), drafts)
    index = jnp.arange(width)
    accepted = verdict.accepted[:, None]
    tokens = jnp.where(index < accepted, jnp.pad(drafts, ((0, 0), (0, 1))), verdict.token[:, None])
    safe = jnp.maximum(tokens, 0)
    stops = jnp.take_along_axis(s.sampling.stop_mask, safe, axis=1)
    proposed = index <= accepted
    broken = proposed & (~healthy | (tokens < 0))
    first_stop, first_broken = _first(stops & proposed), _first(broken)
    count = jnp.minimum(jnp.minimum(verdict.accepted, first_stop) + 1, jnp.minimum(s.remaining, first_broken))
    count = jnp.where(s.active, count, 0)
    finish = jnp.select(
        [~s.active, first_stop < count, count == s.remaining, first_broken <= count],
        [Finish.RUNNING, Finish.STOP, Finish.LENGTH, Finish.NAN],
        Finish.RUNNING,
    ).astype(jnp.int32)
    return Emitted(jnp.where(index < count[:, None], tokens, -1), count, finish)


def _first(flags: Bool[Array, "B W"]) -> Int[Array, " B"]:
    """Index of the first true flag of each row; past the end if there is none."""
    past = flags.shape[1] + 1
    return jnp.min(jnp.where(flags, jnp.arange(past - 1), past), axis=1)


def pack(
    emitted: Emitted, accepted: Int[Array, " B"], drafted: Int[Array, " B"], source: Int[Array, " B"]
) -> Int[Array, "B C"]:
    """The columns of ``StepResult.packed``."""
    extra = jnp.stack([emitted.count, accepted, drafted, emitted.finish, source], axis=1)
    return jnp.concatenate([emitted.tokens, extra], axis=1)
