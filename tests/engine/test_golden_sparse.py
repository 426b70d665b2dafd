"""Decoding with sparse attention against an independent implementation, as in ``test_golden_decoding.py``."""

import pytest

from tests.engine.golden_texts import SPARSE, check_decoding, check_drafts, marked


@pytest.mark.parametrize("variant", marked(SPARSE, rest=("dsa_glm52",)))
def test_tokens_and_acceptance(variant):
    check_decoding(variant)


@pytest.mark.rest
@pytest.mark.parametrize("variant", marked(SPARSE, ("dsa_v32", "dsa_glm52")))
def test_drafts_by_recursion(variant):
    """Later drafts of GLM-5.2 look at what the first one chose."""
    check_drafts(variant, "draft_share" if variant == "dsa_glm52" else "draft_rec", 4)
