"""Decoding against an independent implementation: tokens, accepted drafts of every step, and draft logits.

Texts alone would not show a broken drafter, so acceptance must be the oracle's, step by step. Its loop reuses
NextN layer 0, so the variants with two layers are loaded with one; their chain is compared as drafts.
``test_golden_sparse.py`` has the variants with sparse attention.
"""

import pytest

from tests.engine.golden_texts import (
    DENSE,
    check_decoding,
    check_drafts,
    engine_of,
    jobs,
    loaded,
    marked,
    served,
)
from tests.golden import DECODED, expected
from tests.models import Reference, accepted, serve

rest, slow = pytest.mark.rest, pytest.mark.slow


@pytest.mark.parametrize("variant", marked(DENSE))
def test_tokens_and_acceptance(variant):
    check_decoding(variant)


@pytest.mark.parametrize("depth", [1, 2])
@slow
def test_tokens_and_acceptance_of_shallow_executables(depth):
    """The same in executables that are compiled for the depth, not deeper ones that stop early."""
    want = expected("rigged")
    (request,) = serve(engine_of("rigged"), [jobs("rigged")[depth]], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    assert accepted(request) == want[f"spec_accept.{depth}"].tolist()


# One of each kind of attention; model/test_golden compares the logits of all drafts.
@rest
@pytest.mark.parametrize("variant", marked(DENSE, ("rigged", "glm46")))
def test_drafts_by_recursion(variant):
    check_drafts(variant, "draft_rec", 4)


def test_the_state_before_the_norm_gives_other_drafts():
    """Recycling the wrong hidden state would be noticed: somewhere the oracle's two answers differ."""
    assert any((expected(v)["draft_rec_prenorm_ids"] != expected(v)["draft_rec_ids"]).any() for v in DECODED)


@rest
@pytest.mark.parametrize("variant", ["rigged_mtp2", "mtp2"])
def test_drafts_by_a_chain_of_layers(variant):
    check_drafts(variant, "draft_chain", 2, layers=2)


@rest
def test_tokens_and_acceptance_of_two_layers():
    found, want = loaded("rigged_mtp2", 2), expected("rigged_mtp2")
    requests = served(engine_of("rigged_mtp2", layers=2), "rigged_mtp2")
    assert all(r.progress.output == want["greedy_ids"].tolist() for r in requests)
    reference = Reference(found.params, found.config)
    for depth in (1, 2):
        told = reference.speculate(want["input_ids"].tolist(), len(want["greedy_ids"]), depth)
        assert accepted(requests[depth]) == told.accepted
        assert sum(told.accepted) > 0
    # The third draft reuses layer 0. It changes no earlier one.
    assert requests[3].progress.speculation.accepted_per_position[2] > 0
