"""Drafts from a part of the vocabulary: chi-square of whole steps, and a control that must fail."""

from dataclasses import replace

import pytest

from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.heads.build import build
from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.heads.eagle3.drafts import Eagle3Head
from tests.decode.helpers import leaking
from tests.decode.law import CFG, V, p_values

# Token 0 is never drafted.
LAYER = replace(
    CFG.with_nextn(()), vocab_size=V - 1, num_hidden_layers=1, first_k_dense_replace=1, n_routed_experts=0
)
HEAD = Eagle3Config(layer=LAYER, taps=(0, 1, 2), tap_norms=3, maps=True)
TARGET = replace(CFG.with_nextn(()), drafter=HEAD)


@pytest.mark.parametrize(
    ("verifier", "grammar"),
    [
        pytest.param("rejection", False, marks=pytest.mark.rest),
        pytest.param("block", False, marks=pytest.mark.slow),
        pytest.param("block", True, marks=pytest.mark.slow),
        pytest.param("coupled", False, marks=pytest.mark.slow),
    ],
)
def test_lossless(verifier: str, grammar: bool):
    assert build(TARGET) == Recursive(Eagle3Head(TARGET))
    assert min(p_values(build(TARGET), TARGET, verifier, grammar)) > 1e-4


@pytest.mark.rest
def test_a_law_that_is_not_renormalised_shows():
    lying, reader = leaking(Recursive)(Eagle3Head(TARGET)), build(TARGET)
    assert min(p_values(lying, TARGET, reader=reader)) < 1e-9
