"""The compiled step emits the target's joint distribution: chi-square against a cache-free model."""

import itertools

import numpy as np
import pytest

from tests.decode.law import DEPTH, LENGTH, OPTIONS, PLAIN, chi_square, emitted, exact_law, fits

# Rejection of sampled drafts, under a grammar: drafter/test_suffix_lossless.
FAST = {
    ("sampled", "block"): (),
    ("sampled", "coupled"): pytest.mark.rest,
    ("greedy", "rejection"): pytest.mark.rest,
}
MODES = [*itertools.product(("sampled", "greedy"), ("rejection", "block")), ("sampled", "coupled")]


@pytest.mark.parametrize(
    ("drafting", "verifier"),
    [pytest.param(*m, marks=FAST.get(m, pytest.mark.slow)) for m in MODES],
)
def test_lossless(drafting, verifier):
    """Nothing is fitted: seeds are fixed, so each p-value is one draw that must not be absurdly small."""
    got = emitted(drafting, verifier)
    found = fits(got, PLAIN)
    assert min(found.values()) > 1e-4, found
    for i, option in enumerate(OPTIONS):
        mine = slice(i * PLAIN.rows, (i + 1) * PLAIN.rows)
        rate = got.accepted[mine].sum() / got.drafted[mine].sum()
        assert rate > (0.4 if drafting == "sampled" else 0.25), (
            f"{option}: only {rate:.0%} of the drafts were accepted"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("drafting", "verifier"), [("sampled", "block"), ("greedy", "rejection")])
def test_lossless_under_a_grammar(drafting, verifier):
    got = emitted(drafting, verifier, grammar=True)
    found = fits(got, PLAIN, grammar=True)
    assert min(found.values()) > 1e-4, found
    for accepted, drafted in zip(
        *(np.split(a, len(OPTIONS)) for a in (got.accepted, got.drafted)), strict=True
    ):
        assert accepted.sum() / drafted.sum() > 0.25


def test_the_test_has_power():
    """An option that is ignored, or another law that is not far off, would be noticed."""
    tokens = emitted("sampled", "block").tokens
    for i, option in enumerate(OPTIONS):
        mine = tokens[i * PLAIN.rows : (i + 1) * PLAIN.rows]
        law = exact_law("plain" if option != "plain" else "penalties")
        assert chi_square(mine, law) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["sampled", "greedy"])
def test_block_verification_accepts_at_least_as_much(drafting):
    """arXiv 2403.10444, Theorem 2, up to sampling noise: three standard errors of the difference."""
    block, rejection = (emitted(drafting, v).accepted for v in ("block", "rejection"))
    error = np.sqrt(sum(each.var() / each.size for each in (block, rejection)))
    assert block.mean() > rejection.mean() - 3 * error


@pytest.mark.slow
def test_every_mode_is_one_of_its_own():
    found = {mode: emitted(*mode) for mode in MODES if mode[1] != "coupled"}
    assert found["sampled", "block"].accepted.mean() > found["sampled", "rejection"].accepted.mean()
    for one, other in itertools.combinations(found.values(), 2):
        assert (one.accepted != other.accepted).any()
    for verifier in ("block", "rejection"):
        assert found["sampled", verifier].accepted.mean() > found["greedy", verifier].accepted.mean() + 0.05


def test_rows_verify_their_own_depth():
    got = emitted("sampled", "block")
    depths = np.where(np.arange(len(got.drafted)) % 7 == 0, 0, 1 + np.arange(len(got.drafted)) % DEPTH)
    np.testing.assert_array_equal(got.drafted, depths * (LENGTH - 1))
    assert (got.accepted[depths == 0] == 0).all()
    means = [got.accepted[depths == d].mean() for d in range(DEPTH + 1)]
    assert means == sorted(means)
