"""Drafts of several NextN layers against running each over the whole text."""

from dataclasses import replace

import pytest

from mtp_jax.api.propose import propose
from tests.models import TINY, Reference, make_engine, prompts, rigged
from tests.rounding import near, of_model

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
    near(logits, expected, of_model(THREE_LAYERS, len(prompt) + 4))
    assert ids.tolist() == told
