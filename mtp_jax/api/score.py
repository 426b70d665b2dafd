"""Teacher-forced scoring: every position's logits and hidden states, trunk and NextN, without a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

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
    """Scores sequences; executables are compiled per power-of-two length."""

    def __init__(self, cfg: ModelConfig, on: Backend) -> None:
        self._cfg = cfg
        self._on, mesh = on, on.mesh
        # A sharded batch must divide over the data axis; a copy of the row per shard does.
        self._rows = 1 if mesh is None else mesh.shape["data"]
        self._compiled: dict[tuple[str, int], Any] = {}

    def score(self, params: Params, token_ids: Sequence[int]) -> Scores:
        """Score one sequence of at least one token. params: parameters, of the same shapes in every call."""
        length = len(token_ids)
        hidden, logits, mtp_hidden, mtp_logits = self._call(self._run, params, token_ids)
        # Causal: the padding cannot be seen from the rows that are kept.
        shorter = [max(length - 1 - k, 0) for k in range(len(mtp_hidden))]
        return Scores(
            logits[:length],
            hidden[:length],
            tuple(x[:n] for x, n in zip(mtp_logits, shorter, strict=True)),
            tuple(x[:n] for x, n in zip(mtp_hidden, shorter, strict=True)),
        )

    def hidden(self, params: Params, token_ids: Sequence[int]) -> np.ndarray:
        """The trunk's hidden states alone, [T, D]."""
        return self._call(self._run_trunk, params, token_ids)[: len(token_ids)]

    def _call(
        self, run: Callable[[Params, jax.Array], PyTree], params: Params, token_ids: Sequence[int]
    ) -> PyTree:
        """Call a function with the sequence padded to a power of two."""
        length, padded = len(token_ids), _SMALLEST
        while padded < length:
            padded *= 2
        tokens = np.zeros((self._rows, padded), np.int32)
        tokens[:, :length] = token_ids
        key = run.__name__, padded
        if key not in self._compiled:
            abstract = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
            self._compiled[key] = jax.jit(run).lower(params, abstract).compile()
        return jax.tree.map(lambda a: np.asarray(a[0], np.float32), self._compiled[key](params, tokens))

    def _run_trunk(self, params: Params, tokens: jax.Array) -> jax.Array:
        return trunk.forward(params, self._cfg, tokens, self._on)

    def _run(
        self, params: Params, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
        hidden = self._run_trunk(params, tokens)
        z, states, logits = hidden, [], []
        for k in range(self._cfg.num_nextn_predict_layers):
            following = jnp.roll(tokens, -1 - k, axis=1)
            z = nextn.teacher_forced(params, self._cfg, k, following, z, self._on)
            states.append(z)
            logits.append(nextn.logits(params, k, z, self._on))
        return hidden, trunk.logits(params, hidden, self._on), states, logits
