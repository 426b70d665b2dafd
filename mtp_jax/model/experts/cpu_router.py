"""The choice of experts by comparisons of all with all, which XLA on a CPU compiles to few kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.router import reference
from kernels_pallas.router.rule import Rule

# More comparisons, 16 at a time, would take a core longer than the three kernels that they save.
_COMPARISONS = 1 << 16


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    rule: Rule,
    counted: Bool[Array, " T"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """``reference.choose``, by ranks where rows and experts are few; with the same ids, among equals too."""
    rows, experts = logits.shape
    if rows * experts**2 > _COMPARISONS:
        return reference.choose(logits, bias, rule, counted)
    scores = reference.scores_of(logits, rule)
    choice = scores + bias
    if rule.groups > 1:
        groups = choice.reshape(rows, rule.groups, -1)
        group_score = jnp.where(_ranks(groups) < 2, groups, 0).sum(axis=-1)
        kept = jnp.repeat(_ranks(group_score) < rule.kept, groups.shape[-1], axis=1)
        choice = jnp.where(kept, choice, -jnp.inf)
    here = _ranks(choice)[:, None] == jnp.arange(rule.chosen)[:, None]
    # A maximum, so that a row of NaN, whose ranks are all 0, still gets an id of an expert.
    ids = jnp.where(here, jnp.arange(experts), 0).max(axis=-1)
    return reference.weighed(ids, jnp.where(here, scores[:, None], 0).sum(axis=-1), experts, rule, counted)


def _ranks(x: Float[Array, "*b n"]) -> Int[Array, "*b n"]:
    """The rank of each number in its row, 0 for the largest; of equal numbers the lower index is first."""
    own, other, index = x[..., :, None], x[..., None, :], jnp.arange(x.shape[-1])
    return ((other > own) | (other == own) & (index < index[:, None])).sum(axis=-1, dtype=jnp.int32)
