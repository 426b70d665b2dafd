"""Teacher-forced scoring: every position's logits and hidden states, trunk and NextN, without a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mtp_jax.engine.validate import checked_ids
from mtp_jax.errors import RequestError
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
    """Scores sequences; executables are compiled per number of sequences and power-of-two length."""

    def __init__(self, cfg: ModelConfig, on: Backend) -> None:
        self._cfg = cfg
        self._on, mesh = on, on.mesh
        # A sharded batch must divide over the data axis; with copies of its last row it does.
        self._rows = 1 if mesh is None else mesh.shape["data"]
        self._compiled: dict[tuple[object, ...], Any] = {}

    def score(self, params: Params, token_ids: Sequence[int]) -> Scores:
        """Score a sequence. params: parameters, of the same shapes in every call. Raises RequestError."""
        found = self._call(self._run, params, [token_ids])
        hidden, logits, mtp_hidden, mtp_logits = jax.tree.map(lambda a: np.asarray(a[0], np.float32), found)
        # Causal: the padding cannot be seen from the rows that are kept.
        length = len(token_ids)
        shorter = [max(length - 1 - k, 0) for k in range(len(mtp_hidden))]
        return Scores(
            logits[:length],
            hidden[:length],
            tuple(x[:n] for x, n in zip(mtp_logits, shorter, strict=True)),
            tuple(x[:n] for x, n in zip(mtp_hidden, shorter, strict=True)),
        )

    def features(
        self, params: Params, sequences: Sequence[Sequence[int]], taps: tuple[int, ...] = ()
    ) -> list[tuple[np.ndarray, ...]]:
        """The trunk's hidden states [n, D] of each sequence: after the final norm, then these taps.

        Raises RequestError for bad ids.
        """
        found = self._call(self._run_trunk, params, sequences, taps)
        arrays = [np.asarray(a) for a in found]
        return [tuple(a[i, : len(ids)] for a in arrays) for i, ids in enumerate(sequences)]

    def _call(
        self,
        run: Callable[..., PyTree],
        params: Params,
        sequences: Sequence[Sequence[int]],
        *static: object,
    ) -> PyTree:
        """Call a function with the sequences padded to a power of two, and to rows that divide."""
        limit, padded = self._cfg.max_position_embeddings, _SMALLEST
        checked = [checked_ids(ids, self._cfg.vocab_size) for ids in sequences]
        length = max(map(len, checked))
        if length > limit:
            raise RequestError(f"score takes up to {limit} tokens; got {length}")
        while padded < length:
            padded *= 2
        tokens = np.zeros((-(-len(checked) // self._rows) * self._rows, padded), np.int32)
        for i in range(len(tokens)):
            ids = checked[min(i, len(checked) - 1)]
            tokens[i, : len(ids)] = ids
        key = run.__name__, tokens.shape, *static
        if key not in self._compiled:
            abstract = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
            program = jax.jit(lambda params, tokens: run(params, tokens, *static))
            self._compiled[key] = program.lower(params, abstract).compile()
        return self._compiled[key](params, tokens)

    def _run_trunk(self, params: Params, tokens: jax.Array, taps: tuple[int, ...]) -> list[jax.Array]:
        found = trunk.forward_traced(params, self._cfg, tokens, self._on, taps)
        return [found.hidden, *(found.taps[k] for k in taps)]

    def _run(
        self, params: Params, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
        (hidden,) = self._run_trunk(params, tokens, ())
        z, states, logits = hidden, [], []
        for k in range(self._cfg.num_nextn_predict_layers):
            following = jnp.roll(tokens, -1 - k, axis=1)
            z = nextn.teacher_forced(params, self._cfg, k, following, z, self._on)
            states.append(z)
            logits.append(nextn.logits(params, k, z, self._on))
        return hidden, trunk.logits(params, hidden, self._on), states, logits
