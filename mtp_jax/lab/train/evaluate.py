"""Held-out quality: loss and accuracy of the trunk and the MTP depths, and how well drafts foresee it."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mtp_jax.lab.train.loss import LossFigures, loss
from mtp_jax.lab.train.mixed import differentiable
from mtp_jax.model import nextn, trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params

_BATCH = 4


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out windows.

    Attributes:
        losses: cross entropy (nats per token) of the trunk and of depths 1..K, [1 + K].
        accuracy: fraction of positions whose most likely token is the text's, [1 + K].
        agreement: fraction of positions where depths 1..k all name the trunk's most likely token, [K].
    """

    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    agreement: tuple[float, ...]

    @property
    def acceptance(self) -> float:
        """A teacher-forced estimate of tokens per verify step: 1 + the expected number of agreeing drafts."""
        return 1.0 + sum(self.agreement)


def evaluate(params: Params, cfg: ModelConfig, windows: np.ndarray, depth: int) -> Evaluation:
    """Score windows [count, T + 1 + depth] of held-out ids; `count` is rounded down to a multiple of 4."""
    results = [
        _score(params, cfg, jnp.asarray(windows[i : i + _BATCH]), depth)
        for i in range(0, len(windows) - _BATCH + 1, _BATCH)
    ]
    mean = [np.mean([np.asarray(r[i]) for r in results], axis=0).tolist() for i in range(3)]
    return Evaluation(*(tuple(m) for m in mean))


@functools.partial(jax.jit, static_argnames=("cfg", "depth"))
def _score(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B n"], depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    aux: LossFigures = loss(params, cfg, tokens, 0.0, depth)[1]
    return aux.losses, aux.accuracy, _agreement(params, cfg, tokens, depth).mean((0, 1))


def _agreement(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B n"], depth: int
) -> Bool[Array, "B T K"]:
    """Whether drafts 1..k of every row all equal the trunk's greedy choice for the same position."""
    length, on = tokens.shape[1] - 1 - depth, differentiable()
    hidden = trunk.forward(params, cfg, tokens[:, : length + depth], on)
    greedy = trunk.logits(params, hidden, on).argmax(-1)
    same = []
    drafts = nextn.drafts_forced(params, cfg, tokens, hidden[:, :length], depth, on)
    for k, draft in enumerate(drafts):
        guess = nextn.logits(params, k % len(params.nextn), draft.hidden, on).argmax(-1)
        same.append(guess == greedy[:, k + 1 : k + 1 + length])
    return jnp.cumprod(jnp.stack(same, axis=-1), axis=-1).astype(bool)
