"""Drafts of Medusa heads: chi-square of whole steps, and a control that must fail.

Chains are drawn as block drafters draw them, whose fast tests hold that law (test_block_lossless.py).
"""

from dataclasses import replace

import pytest

from examples.medusa import MedusaConfig
from examples.medusa.drafts import Medusa, MedusaHeads
from mtp_jax.decode.keys import TreeShape
from mtp_jax.heads.build import build
from tests.decode.helpers import leaking
from tests.decode.law import CFG, DEPTH, p_values

TARGET = replace(CFG.with_nextn(()), drafter=MedusaConfig(heads=DEPTH))


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "grammar"), [("rejection", False), ("block", True), ("coupled", False)])
def test_lossless(verifier: str, grammar: bool):
    assert build(TARGET) == Medusa(MedusaHeads(TARGET))
    assert min(p_values(build(TARGET), TARGET, verifier, grammar)) > 1e-4


@pytest.mark.rest
def test_a_tree_is_lossless():
    """Rows that draw, with 0 to 3 nodes each."""
    assert min(p_values(build(TARGET, tree=TreeShape.of("[[0], [1], [0, 0]]")), TARGET, "coupled")) > 1e-4


@pytest.mark.slow
def test_a_law_that_is_not_renormalised_shows():
    assert min(p_values(leaking(Medusa)(MedusaHeads(TARGET)), TARGET)) < 1e-6


@pytest.mark.slow
def test_lossless_where_the_likeliest_drafts_are_verified():
    assert min(p_values(build(TARGET), TARGET, kept=1)) > 1e-4
