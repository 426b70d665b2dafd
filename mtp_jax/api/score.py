"""Teacher-forced scoring: every position's logits and hidden states, trunk and NextN, without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.decode.keys import ScoreKey
from mtp_jax.decode.launches import Runner, Score
from mtp_jax.engine.validate import checked_ids
from mtp_jax.errors import RequestError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.scores import Positions

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
    """Scores sequences; a program is compiled for each number of sequences and power-of-two length."""

    def __init__(self, cfg: ModelConfig, runner: Runner) -> None:
        self._cfg, self._runner = cfg, runner

    def score(self, token_ids: Sequence[int]) -> Scores:
        """Score a sequence. Raises RequestError."""
        found = self._run([token_ids], logits=True)
        # Causal: the padding cannot be seen from the rows that are kept.
        length = len(token_ids)
        states = [np.asarray(a[0], np.float32) for a in (*found.hidden, *found.mtp_hidden)]
        logits = [np.asarray(a[0], np.float32) for a in found.logits]
        (hidden, *mtp_hidden), (trunk, *mtp_logits) = (
            [a[: max(length - k, 0)] for k, a in enumerate(many)] for many in (states, logits)
        )
        return Scores(trunk, hidden, tuple(mtp_logits), tuple(mtp_hidden))

    def hidden_states(
        self, token_ids: Sequence[int], positions: Sequence[int] | None, layers: Sequence[int] | None
    ) -> np.ndarray:
        """The hidden states that ``LLM.hidden_states`` describes. Raises RequestError as it says."""
        most, taps = self._cfg.num_hidden_layers, tuple(layers or ())
        if (layers is not None and not taps) or any(not 0 <= k <= most for k in taps):
            raise RequestError(f"layers = {taps}; expected numbers from 0, the embedding, to {most}")
        final, *streams = self.features([token_ids], taps)[0]
        hidden = final if layers is None else np.stack(streams, axis=1)
        chosen = list(range(len(hidden)) if positions is None else positions)
        wrong = next((p for p in chosen if not -len(hidden) <= p < len(hidden)), None)
        if wrong is not None:
            raise RequestError(f"position {wrong} is outside of {len(hidden)} tokens")
        found = hidden[chosen].astype(np.float32)
        return found if layers is None else found.swapaxes(0, 1)

    def features(
        self, sequences: Sequence[Sequence[int]], taps: tuple[int, ...] = ()
    ) -> list[tuple[np.ndarray, ...]]:
        """The trunk's hidden states [n, D] of each sequence: after the final norm, then these taps.

        Raises RequestError for bad ids.
        """
        arrays = [np.asarray(a) for a in self._run(sequences, taps).hidden]
        return [tuple(a[i, : len(ids)] for a in arrays) for i, ids in enumerate(sequences)]

    def _run(
        self, sequences: Sequence[Sequence[int]], taps: tuple[int, ...] = (), logits: bool = False
    ) -> Positions:
        """Run the program of a key over the sequences, padded to a power of two."""
        limit, padded = self._cfg.max_position_embeddings, _SMALLEST
        checked = [checked_ids(ids, self._cfg.vocab_size) for ids in sequences]
        length = max(map(len, checked))
        if length > limit:
            raise RequestError(f"score takes up to {limit} tokens; got {length}")
        while padded < length:
            padded *= 2
        tokens = np.zeros((len(checked), padded), np.int32)
        for row, ids in zip(tokens, checked, strict=True):
            row[: len(ids)] = ids
        key = ScoreKey(len(checked), padded, taps, logits)
        self._runner.compile([key])
        return self._runner.do(Score(key, tokens)).read()
