"""Suffix drafts under every verifier: chi-square of whole steps, with and without a grammar's masks."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.heads.build import build
from tests.decode.law import CFG, Case, V, emitted, fits

# Every token is in the prompt, so nearly every row has drafts if a match of one token is enough. If it takes
# two tokens, some rows have them. What follows here is what the model likes to emit, too.
PROMPT = (3, 3, 1, 2, 1, 2, 0, 3, 0)


def case(drafter: Drafter) -> Case:
    return Case(drafter, PROMPT, page=32)


MIXED, EVERY = case(Suffix(build(CFG), shortest=2)), case(Suffix(build(CFG), shortest=1))
ALONE = case(Suffix(Nothing(V), shortest=1))


@pytest.mark.parametrize(
    ("verifier", "grammar"),
    [
        pytest.param("rejection", True, marks=pytest.mark.rest),
        pytest.param("block", False, marks=pytest.mark.slow),
        pytest.param("rejection", False, marks=pytest.mark.slow),
        pytest.param("block", True, marks=pytest.mark.slow),
        pytest.param("coupled", False, marks=pytest.mark.slow),
        pytest.param("coupled", True, marks=pytest.mark.slow),
    ],
)
def test_lossless(verifier, grammar):
    got = emitted("sampled", verifier, grammar, MIXED)
    check(got, MIXED, grammar)
    # Both drafters are at work, side by side.
    assert 0.2 < got.suffix_drafted.sum() / got.drafted.sum() < 0.8
    for drafted, accepted in (
        (got.suffix_drafted, got.suffix_accepted),
        (got.drafted - got.suffix_drafted, got.accepted - got.suffix_accepted),
    ):
        assert accepted.sum() / drafted.sum() > 0.2


@pytest.mark.slow
def test_lossless_where_the_likeliest_drafts_are_verified():
    """A match is as likely as it is long, by an estimate of its own."""
    what = replace(MIXED, kept=1)
    got = emitted("sampled", "block", False, what)
    check(got, what, grammar=False)
    assert 0 < got.suffix_drafted.sum() < got.drafted.sum()


@pytest.mark.parametrize(
    ("what", "grammar"),
    [
        pytest.param(EVERY, True, id="every", marks=pytest.mark.slow),
        pytest.param(ALONE, False, id="alone", marks=pytest.mark.rest),
    ],
)
def test_lossless_with_hardly_anything_else(what, grammar):
    got = emitted("sampled", "block", grammar, what)
    check(got, what, grammar)
    assert got.suffix_drafted.sum() > 0.8 * got.drafted.sum()
    assert got.suffix_accepted.sum() / got.suffix_drafted.sum() > 0.2


@pytest.mark.rest
def test_alone_there_are_drafts_where_there_are_matches():
    got = emitted("sampled", "block", False, ALONE)
    np.testing.assert_array_equal(got.drafted, got.suffix_drafted)
    np.testing.assert_array_equal(got.accepted, got.suffix_accepted)


def check(got, what, grammar):
    found = fits(got, what, grammar)
    assert min(found.values()) > 1e-4, found
