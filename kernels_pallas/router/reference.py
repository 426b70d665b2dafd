"""The choice of experts in plain jnp: the oracle, and the implementation without a Hopper GPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.router.rule import Rule

# Number of tokens whose choices are counted together, and of which the rows of counts come whole blocks.
ROWS = 4
BLOCK = 64


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    rule: Rule,
    counted: Bool[Array, " T"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Experts of each token, best first, and their weights; the lower id among equals.

    Scores; groups, then experts, chosen by bias-corrected score (arXiv 2412.19437, eqs. 12-16). The
    bias only selects: weights come from the scores alone.

    counted: whether each token chooses; other tokens have id E, which is no expert. None: all choose.
    """
    scores = scores_of(logits, rule)
    choice = scores + bias
    rows, experts = choice.shape
    if rule.groups > 1:
        # Two dimensions throughout: with more, XLA on a CPU sorts instead of taking the top k.
        groups = choice.reshape(rows * rule.groups, -1)
        group_score = jax.lax.top_k(groups, 2)[0].sum(axis=-1).reshape(rows, rule.groups)
        best = jax.lax.top_k(group_score, rule.kept)[1]
        kept = (best[..., None] == jnp.arange(rule.groups)).any(axis=1)
        choice = jnp.where(jnp.repeat(kept, experts // rule.groups, axis=1), choice, -jnp.inf)
    ids = jax.lax.top_k(choice, rule.chosen)[1]
    return weighed(ids, jnp.take_along_axis(scores, ids, axis=-1), experts, rule, counted)


def scores_of(logits: Float[Array, "T E"], rule: Rule) -> Float[Array, "T E"]:
    """Scores of experts."""
    if rule.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jnp.sqrt(jax.nn.softplus(logits))


def given(
    logits: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    rule: Rule,
    counted: Bool[Array, " T"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """``choose`` where the experts of each token are known."""
    scores = jnp.take_along_axis(scores_of(logits, rule), ids, axis=-1, mode="clip")
    return weighed(ids, scores, logits.shape[-1], rule, counted)


def weighed(
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: int,
    rule: Rule,
    counted: Bool[Array, " T"] | None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The result of ``choose``, given the chosen experts and their scores."""
    if rule.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    ids = ids if counted is None else jnp.where(counted[:, None], ids, experts)
    return ids, weights * rule.scaling


def count(ids: Int[Array, "T k"], experts: int) -> Int[Array, "b E"]:
    """Count the choices of each expert by each ``ROWS`` tokens, and zeros up to a whole ``BLOCK`` of tokens.

    Ids outside of the experts are not counted.
    """
    padded = jnp.pad(ids, ((0, -ids.shape[0] % BLOCK), (0, 0)), constant_values=experts)
    parts = padded.reshape(-1, ROWS * ids.shape[1], 1)
    return (parts == jnp.arange(experts)).sum(axis=1, dtype=jnp.int32)
