"""Drafts of several NextN layers against running each over the whole text."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.api.propose import propose
from tests.models import TINY, Reference, make_engine, prompts, rigged

THREE_LAYERS = replace(TINY, num_nextn_predict_layers=3, nextn_moe=(False, True, False))


@pytest.fixture(scope="module")
def both():
    params = rigged(THREE_LAYERS)
    return make_engine(params, THREE_LAYERS), Reference(params, THREE_LAYERS)


@pytest.mark.parametrize("prompt", prompts(3, shortest=2), ids=len)
def test_every_layer_drafts_from_a_whole_history(both, prompt):
    engine, reference = both
    token, ids, logits = propose(engine, prompt, 3)
    told, expected = reference.drafts([*prompt, token], 3)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    assert ids.tolist() == told
