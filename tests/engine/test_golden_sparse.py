"""Decoding with sparse attention against an independent implementation, as in ``test_golden_decoding.py``."""

from dataclasses import replace

import pytest

from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.golden_texts import SPARSE, check_decoding, check_drafts, loaded, marked
from tests.golden import expected
from tests.models import accepted, make_engine, serve


@pytest.mark.parametrize("variant", marked(SPARSE, rest=("dsa_glm52",)))
def test_tokens_and_acceptance(variant):
    check_decoding(variant)


@pytest.mark.rest
@pytest.mark.parametrize("variant", marked(SPARSE, ("dsa_v32", "dsa_glm52")))
def test_drafts_by_recursion(variant):
    """Later drafts of GLM-5.2 look at what the first one chose."""
    check_drafts(variant, "draft_share" if variant == "dsa_glm52" else "draft_rec", 4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dsa_glm5", "dsa_glm52"])
def test_trees(variant):
    """Greedy and drawn texts are those without drafts. GLM-5.2's drafts attend to one choice."""
    found, want = loaded(variant), expected(variant)
    engine = make_engine(
        found.params,
        found.config,
        tree="4x3x12",
        num_speculative_tokens=12,
        verifier="coupled",
        prefill_chunk=64,
        max_model_len=80,
    )
    greedy = SamplingParams(temperature=0, max_tokens=len(want["greedy_ids"]))
    drawn = replace(greedy, temperature=0.7, seed=3)
    each = greedy, drawn, replace(drawn, num_speculative_tokens=0)
    first, second, plain = serve(engine, [(want["input_ids"].tolist(), p) for p in each], exactly=True)
    assert first.progress.output == want["greedy_ids"].tolist()
    assert second.progress.output == plain.progress.output
    for request in (first, second):
        assert sum(accepted(request)) > 0
    assert len(accepted(first)) < len(want["spec_accept.3"])  # of a chain as long as the tree's ways
