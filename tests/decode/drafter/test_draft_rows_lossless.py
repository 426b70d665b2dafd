"""Drafts from a part of the trunk's table: chi-square of whole steps, and a control that must fail."""

from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots
from mtp_jax.heads.build import build
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.params import Params
from tests.decode.law import CFG, p_values

# Token 1 is never drafted.
IDS = (3, 0, 2)


@pytest.mark.parametrize(
    ("verifier", "grammar"),
    [
        pytest.param("block", False, marks=pytest.mark.rest),
        pytest.param("rejection", False, marks=pytest.mark.rest),
        pytest.param("coupled", False, marks=pytest.mark.slow),
        pytest.param("block", True, marks=pytest.mark.slow),
    ],
)
def test_lossless(verifier: str, grammar: bool):
    assert min(p_values(build(CFG), CFG, verifier, grammar, draft_vocab=IDS)) > 1e-4


class WholeLaw(Recursive):
    """Draws from the part, and says that it drew from the whole vocabulary."""

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Any
    ) -> tuple[Drafts, DrafterState]:
        drafts, after = super().propose(params, own, s, rules, on)
        whole, _ = super().propose(replace(params, draft_rows=None), own, s, rules, on)
        return drafts.replace(probs=whole.probs), after


@pytest.mark.rest
def test_a_law_of_the_whole_vocabulary_shows():
    found = p_values(WholeLaw(NextNLayers(CFG)), CFG, "block", reader=build(CFG), draft_vocab=IDS)
    assert min(found) < 1e-9
