"""Chances learned from margins, and the time that verification of the likeliest drafts saves with them."""

from dataclasses import replace
from statistics import mean

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import ranking
from mtp_jax.decode.keys import Origin
from mtp_jax.engine.depth_policy import DepthPolicy
from mtp_jax.engine.survival import Offered, Survival
from tests.engine.mixed_rows import Mixed, over_best_uniform, worlds
from tests.rounding import near

K, ROWS, POLICY = 3, 32, DepthPolicy()


def told(slope: float, bias: float, steps: int, source: int = Origin.NEXTN, seed: int = 0) -> Survival:
    """An estimator that saw steps of drafts with this law, of which rows verify one to three."""
    rng = np.random.default_rng(seed)
    found = Survival(K, POLICY.memory, POLICY.prior, POLICY.weight)
    for _ in range(steps):
        margins = rng.exponential(2, (ROWS, K))
        hit = rng.random((ROWS, K)) < 1 / (1 + np.exp(-(slope * margins + bias)))
        verified = 1 + rng.integers(0, K, ROWS)
        accepted = np.minimum(np.logical_and.accumulate(hit, axis=1).sum(axis=1), verified)
        found.add(Offered(np.full(ROWS, source), margins, verified, accepted))
    return found


def test_slope_and_bias_are_found():
    found = told(0.8, -1.0, steps=400)
    np.testing.assert_allclose(found.estimate[Origin.NEXTN], [[0.8, -1.0]] * K, atol=0.15)
    # Another source has seen nothing, and keeps the prior's mean.
    near(found.estimate[Origin.SUFFIX], [[0, np.log(7 / 3)]] * K, terms=1)


def test_a_margin_that_says_nothing_leaves_the_mean():
    """Its slope is far smaller than the fit's, which is never 0."""
    chance = 1 / (1 + np.exp(-0.4))
    for seed in range(5):
        found = told(0.0, 0.4, steps=200, seed=seed)
        margins = np.tile(np.linspace(0, 6, ROWS)[:, None], (1, K))
        none = np.zeros(ROWS, int)
        first = found.of(Offered(none, margins, none, none))[:, 0]
        assert np.ptp(first) < 0.1
        assert first.mean() == pytest.approx(chance, abs=0.06)


def test_later_steps_count_more():
    found = told(0.8, -1.0, steps=300)
    rng = np.random.default_rng(5)
    for _ in range(1000):
        margins = rng.exponential(2, (ROWS, K))
        found.add(Offered(np.zeros(ROWS, int), margins, np.full(ROWS, K), np.zeros(ROWS, int)))
    none = np.zeros(1, int)
    assert found.of(Offered(none, np.full((1, K), 2.0), none, none))[0, 0] < 0.02


def test_margins_that_are_no_numbers_change_nothing():
    found = told(0.8, -1.0, steps=50)
    before, broken = found.estimate, np.full((ROWS, K), np.nan)
    offered = Offered(np.zeros(ROWS, int), broken, np.full(ROWS, K), np.zeros(ROWS, int))
    found.add(offered)
    np.testing.assert_allclose(found.estimate, before, atol=0.05)
    assert (found.of(offered) == 0).all()


def test_the_device_has_the_same_chances():
    found, rng = told(0.8, -1.0, steps=50), np.random.default_rng(1)
    margins, source = rng.exponential(2, (ROWS, K)).astype(np.float32), rng.integers(0, 2, ROWS)
    here = found.of(Offered(source, margins, source, source))
    there = ranking.survival(jnp.asarray(margins), jnp.asarray(source), jnp.asarray(found.estimate))
    near(there, here, 5 * K)  # chances of K drafts, each of which takes five operations


def gain(several: list[Mixed], seeds: range = range(1)) -> float:
    return mean(over_best_uniform(world, seed)[0] for world in several for seed in seeds)


SOME = slice(1, 5, 3)  # 8 and 32 rows, each of which costs 2 % of a step


@pytest.mark.rest
@pytest.mark.parametrize(("kinds", "least"), [(("mixed", "two"), 1.10), (("alike", "poor"), 0.98)])
@pytest.mark.parametrize(
    ("some", "seeds"),
    [(SOME, range(1)), pytest.param(slice(None), range(2), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_faster_than_the_best_uniform_depth(kinds, least, some, seeds):
    """The estimate, the costs and the way begin with nothing; the best depth is known in hindsight only."""
    assert gain([world for kind in kinds for world in worlds(kind)[some]], seeds) >= least


@pytest.mark.rest
def test_a_useless_margin_costs_nothing():
    assert gain([replace(world, noise=6, spread=0.2) for world in worlds("alike")[SOME]]) >= 0.98


@pytest.mark.rest
def test_the_gain_is_that_of_ranking():
    """The same controller without ranked steps has none, and ranked steps have more rows that pay."""
    world = Mixed("two", 32, 0.02)
    (alone, few), (ranked, many) = (over_best_uniform(world, 0, ranked) for ranked in (False, True))
    assert alone < 1 < 1.1 < ranked
    assert few < many < world.rows * (1 + 7) / 2
