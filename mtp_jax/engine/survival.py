"""Chances that drafts survive, learned from their margins while serving. No jax.

The logit of a draft's acceptance, once the drafts before it were accepted, is taken to be slope x margin +
bias, by the draft's source and position: vLLM's adaptive verification found the top-2 margin alone as good as
four features, and better than a trained confidence head. Each step of the engine is one Newton step; older
steps count less. A slope that is small beside its own error is shrunk towards 0, so that a margin which says
nothing leaves each position its mean.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from mtp_jax.decode.keys import Origin


@dataclass(frozen=True)
class Offered:
    """The drafts that one step made for its rows.

    Attributes:
        source: ``Origin`` of each row's drafts.
        margins: see ``Drafts.margins``.
        verified, accepted: number of drafts, of each row.
    """

    source: Int[np.ndarray, " n"]
    margins: Float[np.ndarray, "n K"]
    verified: Int[np.ndarray, " n"]
    accepted: Int[np.ndarray, " n"]


class Survival:
    """Chances that drafts survive.

    Attributes:
        estimate: slope and bias by source and position, float32 [sources, K, 2] (see ``ranking.survival``).
    """

    def __init__(self, most: int, memory: float, prior: float, weight: float) -> None:
        """Before any draft was observed it is accepted with probability ``prior``.

        most: number of drafts of the deepest step. memory: steps after which an observation counts 1/e.
        weight: number of drafts that the prior counts for.
        """
        self._fade = 1 - 1 / memory
        shape = len(Origin), most
        self._fit = np.zeros((*shape, 2))
        self._fit[..., 1] = np.log(prior / (1 - prior))
        # The prior knows of each position's mean, and of a slope only that it is not large.
        self._prior = weight * prior * (1 - prior) * np.eye(2)
        self._known = np.zeros((*shape, 2, 2))
        self.estimate = self._shrunk()

    def add(self, offered: Offered) -> None:
        """Add the drafts of a step."""
        self._known *= self._fade
        index = np.arange(offered.margins.shape[1])
        reached = index < np.minimum(offered.accepted + 1, offered.verified)[:, None]
        held = index < offered.accepted[:, None]
        x = np.stack([offered.margins, np.ones_like(offered.margins)], axis=-1)
        for source in np.unique(offered.source):
            rows = (offered.source == source)[:, None] & reached & np.isfinite(offered.margins)
            fit = self._fit[source, : len(index)]
            chance = _sigmoid(np.sum(np.where(rows[..., None], x, 0) * fit, axis=-1))
            missed = np.where(rows, held - chance, 0)
            weight = np.where(rows, chance * (1 - chance), 0)
            seen = np.where(rows[..., None], x, 0)
            known = self._known[source, : len(index)]
            known += np.einsum("nk,nka,nkb->kab", weight, seen, seen)
            towards = np.einsum("nk,nka->ka", missed, seen)
            fit += np.linalg.solve(known + self._prior, towards[..., None])[..., 0]
        self.estimate = self._shrunk()

    def _shrunk(self) -> Float[np.ndarray, "s K two"]:
        """The fit with each slope as far as it stands out from its error (James and Stein's factor)."""
        known = self._known + self._prior
        slope, bias = self._fit[..., 0], self._fit[..., 1]
        signal = slope**2 / np.linalg.inv(known)[..., 0, 0]
        kept = slope * np.maximum(1 - 1 / np.maximum(signal, 1), 0)
        mean = known[..., 0, 1] / known[..., 1, 1]
        return np.stack([kept, bias + (slope - kept) * mean], axis=-1).astype(np.float32)

    def of(self, offered: Offered) -> Float[np.ndarray, "n K"]:
        """The chance that each draft and all before it are accepted, whether they were or not."""
        estimate = self.estimate[offered.source, : offered.margins.shape[1]].astype(np.float64)
        chance = _sigmoid(estimate[..., 0] * offered.margins + estimate[..., 1])
        return np.cumprod(np.where(np.isnan(chance), 0, chance), axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
