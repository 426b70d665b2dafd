"""The drafts that a step verifies where it does not verify all: their choice, and the law of the text."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import ranking
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.keys import Origin
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.heads.build import build
from mtp_jax.model.backend import Backend, xla
from mtp_jax.model.params import Params
from mtp_jax.model.parts import Packing
from mtp_jax.model.trunk import Model
from mtp_jax.simulate.ranking import likeliest
from tests.decode.helpers import zeroed
from tests.decode.law import CFG, p_values
from tests.models import TINY
from tests.rounding import near

SLOTS, K = 6, 4
ESTIMATE = np.array([[[0.8, -1.0]] * K, [[0.1, 0.5]] * K], np.float32)


def slots(depth: list[int], idle: int | None = None) -> Slots:
    shape = StateShape(SLOTS, SLOTS, 16, 1)
    state = abstract_state(Model(TINY, xla()), build(TINY), shape).slots
    return zeroed(state).replace(depth=np.array(depth), active=np.arange(SLOTS) != idle)


def drafts(margins: np.ndarray, source: int = Origin.NEXTN) -> Drafts:
    tokens, number = np.zeros((SLOTS, K), np.int32), np.full(SLOTS, K)
    given: list[Any] = [tokens, number, np.full(SLOTS, source), None, None]
    return Drafts(*given, margins=jnp.asarray(margins))


# Number i at place i of a window.
WINDOW = np.arange(SLOTS * (K + 1)).reshape(SLOTS, K + 1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def kept_of(d: Drafts, s: Slots, count: int, shards: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The counts of kept drafts, and ``WINDOW`` packed and unpacked."""
    found, packing = ranking.likeliest(d, s, jnp.asarray(ESTIMATE), count, shards)
    rows = packing.packed(jnp.asarray(WINDOW))
    return found.count, rows, packing.unpacked(rows)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_likeliest_drafts_of_each_shard(rng, shards, count):
    """The kept drafts are the asked number, begin their rows, and are no less likely than any other draft."""
    depth = [4, 2, 4, 4, 0, 3]
    margins = rng.exponential(2, (SLOTS, K)).astype(np.float32)
    kept, rows, back = map(np.asarray, kept_of(drafts(margins), slots(depth, idle=3), count, shards))
    most = np.where(np.arange(SLOTS) == 3, 0, depth)
    own = SLOTS // shards
    chance = np.cumprod(1 / (1 + np.exp(1.0 - 0.8 * margins)), axis=1)
    for at in range(0, SLOTS, own):
        mine = slice(at, at + own)
        assert kept[mine].sum() == min(count, most[mine].sum())
        assert (kept[mine] <= most[mine]).all()
        there = np.arange(K) < most[mine, None]
        chosen = np.arange(K) < kept[mine, None]
        assert chance[mine][chosen].min(initial=1) >= chance[mine][there & ~chosen].max(initial=0)
        np.testing.assert_array_equal(likeliest(margins[mine], most[mine], ESTIMATE[0], count), kept[mine])
    # Every newest token and every kept draft has a row of its own, and comes back from it.
    assert rows.shape == (shards, own + count)
    real = np.arange(K + 1) <= kept[:, None]
    np.testing.assert_array_equal(back[real], WINDOW[real])


def test_equal_chances_are_taken_from_the_front():
    sure = np.full((SLOTS, K), 200, np.float32)  # every chance is 1
    count, *_ = kept_of(drafts(sure), slots([K] * SLOTS), 9, 1)
    assert sorted(count.tolist()) == [1, 1, 1, 2, 2, 2]


def test_a_broken_drafter_comes_last():
    margins = np.full((SLOTS, K), 1, np.float32)
    margins[2, 1] = np.nan
    count, *_ = kept_of(drafts(margins), slots([K] * SLOTS), 21, 1)
    assert count.tolist() == [4, 4, 1, 4, 4, 4]


def test_each_source_has_its_own_estimate():
    margins, sources = np.full((2, K), 3, np.float32), np.array([Origin.NEXTN, Origin.SUFFIX])
    found = jax.jit(ranking.survival)(margins, sources, ESTIMATE)
    want = (1 / (1 + np.exp([[-1.4], [-0.8]]))) ** np.arange(1, K + 1)
    near(found, want, terms=6 * K)  # a factor's product, sum, exponential, sum, quotient, and the product


def test_margins_are_the_gap_between_the_best_logits():
    logits = jnp.array([[1.0, 4.0, 2.5, -jnp.inf], [3.0, 3.0, 0.0, 1.0]])
    margin = DraftRules(1, 1, margins=True).margin(logits)
    assert margin is not None
    assert margin.tolist() == [1.5, 0]
    assert DraftRules(1, 1).margin(logits) is None


def test_packing_needs_no_row_for_a_token_that_nobody_looks_at():
    packing = Packing(jnp.array([[0, 2, 1]]), jnp.array([[0, 2], [1, 0]]))
    rows = packing.packed({"a": jnp.arange(8.0).reshape(2, 2, 2)})["a"]
    assert rows.tolist() == [[[0, 1], [4, 5], [2, 3]]]
    assert packing.unpacked(rows)[0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "verifier",
    [
        pytest.param("rejection", marks=pytest.mark.rest),
        pytest.param("block", marks=pytest.mark.slow),
    ],
)
def test_lossless(verifier):
    """A third of the drafts is verified; which, margins decide."""
    assert min(p_values(build(CFG), CFG, verifier, kept=1)) > 1e-4


@dataclass(frozen=True)
class Telling(Recursive):
    """Its margins depend on the drawn token: its own log-probability."""

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        made, own = super().propose(params, own, s, rules, on)
        if made.probs is None:
            return made, own
        told = jnp.take_along_axis(made.probs, made.tokens[..., None], axis=2)[..., 0]
        return made.replace(margins=4 * jnp.log(told)), own


@pytest.mark.rest
def test_a_choice_that_knows_the_draft_shows():
    plain = build(CFG)
    assert isinstance(plain, Recursive)
    assert min(p_values(Telling(plain.module), CFG, kept=1, reader=plain)) < 1e-9
