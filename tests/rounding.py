"""How far rounding moves results: derived from number formats and lengths of sums, never observed.

Rounding errors of a sum of n terms are nearly independent, and each has a mean near zero. The error of the
sum is a random walk of n steps, each at most u times the largest partial sum (u: the format's unit roundoff),
so that it is of the order of ``sqrt(n) * u * size`` in whatever order the terms are added (N. J. Higham,
T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem
3.1). Which order that is depends on the processor: it sums in 4, 8 or 16 lanes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params, param_specs

# Standard deviations of the walk that a comparison allows. A normal variable is beyond 4 once in 16,000
# times, and a step's deviation is at most u / sqrt(3) times a partial sum, of which ``size`` is the largest.
DEVIATIONS = 4


def roundoff(dtype: Any = np.float32) -> float:
    """The format's largest relative error: half of the distance from 1 to the next number."""
    return float(jnp.finfo(dtype).eps) / 2


def error(terms: float, size: Any = 1.0, dtype: Any = np.float32) -> Any:
    """The difference that rounding explains between two results of size ``size``.

    terms: roundings on the way to a result, the additions of all its sums. dtype: of partial results.
    """
    return DEVIATIONS * np.sqrt(terms) * roundoff(dtype) * size


def near(
    got: Any, want: Any, terms: float, dtype: Any = np.float32, size: float | None = None, name: str = ""
) -> None:
    """Assert that rounding explains the difference of two arrays.

    size: the largest partial sum; the largest finite ``want`` stands for it, unless terms cancel.
    """
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    if size is None:
        size = float(np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)).max(initial=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=error(terms, size, dtype), err_msg=name)


@functools.cache
def of_model(cfg: ModelConfig, tokens: int) -> int:
    """Terms of the sums that follow each other from a token to its logits, drafts included.

    Every weight is a factor of one sum, as long as its last axis; attention sums twice over ``tokens``.
    """
    weights = sum(spec.tensor_shape[-1] for spec in jax.tree.leaves(param_specs(cfg)))
    return weights + 2 * tokens * (cfg.num_hidden_layers + cfg.num_nextn_predict_layers)


def largest_logit(params: Params, cfg: ModelConfig) -> float:
    """A bound of logits and of their partial sums: a state is ``norm`` times a vector of length sqrt(D)."""
    rows = np.linalg.norm(np.asarray(params.head) * np.asarray(params.norm), axis=1)
    return float(rows.max() * np.sqrt(cfg.hidden_size))
