"""Teacher-forced scoring: every position's logits and hidden states, trunk and NextN, without a cache."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.model import nextn, trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params

_SMALLEST = 16


@dataclass(frozen=True)
class Scores:
    """Float32 numpy arrays for a sequence of T tokens.

    Attributes:
        logits: [T, V]; row i predicts token i+1.
        hidden: [T, D], after the final norm.
        mtp_logits: per NextN layer k, [T-1-k, V]; row i predicts token i+2+k.
        mtp_hidden: per NextN layer k, [T-1-k, D], after shared_head.norm.
    """

    logits: np.ndarray
    hidden: np.ndarray
    mtp_logits: tuple[np.ndarray, ...]
    mtp_hidden: tuple[np.ndarray, ...]


class Scorer:
    """Scores sequences; one executable per power-of-two length."""

    def __init__(self, cfg: ModelConfig, on: Backend) -> None:
        self._cfg = cfg
        self._on, mesh = on, on.mesh
        # A sharded batch must divide over the data axis; a copy of the row per shard does.
        self._rows = 1 if mesh is None else mesh.shape["data"]
        self._compiled: dict[int, Any] = {}

    def score(self, params: Params, token_ids: list[int]) -> Scores:
        """Score one sequence of at least one token. params: each time of the same shapes."""
        length, padded = len(token_ids), _SMALLEST
        while padded < length:
            padded *= 2
        tokens = np.zeros((self._rows, padded), np.int32)
        tokens[:, :length] = token_ids
        if padded not in self._compiled:
            abstract = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
            self._compiled[padded] = jax.jit(self._run).lower(params, abstract).compile()
        out = jax.tree.map(lambda a: np.asarray(a[0], np.float32), self._compiled[padded](params, tokens))
        hidden, logits, mtp_hidden, mtp_logits = out
        # Causal: what stands in the padding cannot be seen from the rows that are kept.
        shorter = [max(length - 1 - k, 0) for k in range(len(mtp_hidden))]
        return Scores(
            logits[:length],
            hidden[:length],
            tuple(x[:n] for x, n in zip(mtp_logits, shorter, strict=True)),
            tuple(x[:n] for x, n in zip(mtp_hidden, shorter, strict=True)),
        )

    def _run(self, params: Params, tokens: jax.Array) -> Any:
        hidden = trunk.forward(params, self._cfg, tokens, self._on)
        z, states, logits = hidden, [], []
        for k in range(self._cfg.num_nextn_predict_layers):
            following = jnp.roll(tokens, -1 - k, axis=1)
            z = nextn.teacher_forced(params, self._cfg, k, following, z, self._on)
            states.append(z)
            logits.append(nextn.logits(params, k, z, self._on))
        return hidden, trunk.logits(params, hidden, self._on), states, logits
