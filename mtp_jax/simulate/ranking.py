"""The ranking of drafts (``decode.ranking``) in numpy. No jax here."""

import numpy as np
from jaxtyping import Float, Int


def likeliest(
    margins: Float[np.ndarray, "n K"],
    most: Int[np.ndarray, " n"],
    estimate: Float[np.ndarray, "K two"],
    count: int,
) -> Int[np.ndarray, " n"]:
    """The number of drafts that each row verifies: together the ``count`` likeliest, each row ``most``."""
    slope, bias = estimate.T
    chance = np.cumprod(1 / (1 + np.exp(-(slope * margins + bias))), axis=1)
    by_position = np.where(np.arange(margins.shape[1]) < most[:, None], chance, -1).T.reshape(-1)
    best = np.argsort(-by_position, kind="stable")[:count]
    best = best[by_position[best] >= 0]
    return np.bincount(best % len(margins), minlength=len(margins))
