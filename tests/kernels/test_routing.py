"""The choice of experts and the layout of their rows: oracles, and what the interpreter finds."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.registry import cases
from kernels_pallas.expert_layout import api as expert_layout
from kernels_pallas.router import api, mosaic_gpu, reference
from kernels_pallas.router.rule import Rule
from tests.kernels.interpreter import needs_interpreter, notices
from tests.rounding import near

CASES = {c.name: c for c in (*cases("router/"), *cases("expert_layout/")) if c.small}
RULES = {
    "groups": Rule(chosen=4, groups=4, kept=2, scaling=2.5),
    "one group": Rule(chosen=5, normalise=False),
    "all groups": Rule(chosen=3, groups=4, kept=4),
}


def plain_choice(logits: np.ndarray, bias: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Row by row; Python's sort keeps the order of equals. Which scores are equal float32 decides."""
    ids, weights = [], []
    each = np.asarray(jax.jit(jax.nn.sigmoid)(logits))
    near(each, 1 / (1 + np.exp(-logits.astype(np.float64))), 3)  # an exponential, a sum, a quotient
    for scores in each:
        choice = scores + bias
        groups = np.sort(choice.reshape(rule.groups, -1), axis=1)
        best = groups[:, -1] + groups[:, -2]
        kept = sorted(range(rule.groups), key=lambda g, best=best: -best[g])[: rule.kept]
        allowed = [e for e in range(len(scores)) if e // groups.shape[1] in kept]
        chosen = sorted(allowed, key=lambda e, choice=choice: -choice[e])[: rule.chosen]
        w = scores[chosen].astype(np.float64)
        ids.append(chosen)
        weights.append((w / w.sum() if rule.normalise else w) * rule.scaling)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("name", RULES)
def test_the_first_of_equal_experts_is_chosen(name):
    rng = np.random.default_rng(3)
    logits = (rng.integers(-3, 4, size=(50, 16)) / 2).astype(np.float32)
    bias = (rng.integers(-1, 2, size=16) / 4).astype(np.float32)
    got = jax.jit(partial(api.choose, rule=RULES[name], implementation="xla"))(logits, bias)
    ids, weights = plain_choice(logits, bias, RULES[name])
    assert got.counts is not None
    np.testing.assert_array_equal(got.ids, ids)
    near(got.weights, weights, 16)
    np.testing.assert_array_equal(
        np.asarray(got.counts).sum(axis=0), np.bincount(ids.reshape(-1), minlength=16)
    )


def test_counts_are_of_4_tokens_each_for_whole_blocks_of_64():
    ids = np.random.default_rng(0).integers(0, 9, size=(150, 3))
    expected = [np.bincount(ids[i : i + 4].reshape(-1), minlength=9) for i in range(0, 192, 4)]
    np.testing.assert_array_equal(jax.jit(reference.count, static_argnums=1)(ids, 9), expected)


@pytest.mark.parametrize(
    ("experts", "rule", "match"),
    [(520, Rule(8), "520 experts, at most 512"), (64, Rule(2, groups=16, kept=2), "4 experts in each group")],
)
def test_what_the_router_cannot_do_is_refused(experts, rule, match):
    with pytest.raises(ValueError, match=match):
        api.choose(jnp.zeros((64, experts)), jnp.zeros(experts), rule, implementation="mosaic_gpu")


def test_experts_that_the_layout_cannot_have_are_refused():
    one = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="12 experts, must be a multiple of 8"):
        expert_layout.arrange(
            jnp.zeros((64, 1), jnp.int32),
            jnp.zeros((1, 12), jnp.int32),
            one,
            experts=12,
            rows=64,
            implementation="mosaic_gpu",
        )


@needs_interpreter
def test_another_order_among_equals_is_noticed(monkeypatch):
    def last(choice, top, lane):
        width = lane.shape[1]
        at = [jnp.where(c == top, lane + i * width, -1) for i, c in enumerate(choice)]
        return functools.reduce(jnp.maximum, at).max(axis=1)

    monkeypatch.setattr(mosaic_gpu, "_first", last)
    assert notices(CASES["router/small-one-group"])
