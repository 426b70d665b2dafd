"""Drafts of blocks, each drawn after the one before it: chi-square of steps, and controls that must fail."""

from dataclasses import replace

import pytest

from mtp_jax.heads.blocks.declared import BlockConfig
from mtp_jax.heads.blocks.drafts import BlockDrafter, Blocks
from mtp_jax.heads.build import build
from mtp_jax.model.config import GqaConfig, ModelConfig
from tests.decode.helpers import leaking
from tests.decode.law import CFG, V, p_values

LAYERS = ModelConfig(
    vocab_size=V,
    hidden_size=CFG.hidden_size,
    intermediate_size=CFG.intermediate_size,
    num_hidden_layers=1,
    num_attention_heads=2,
    first_k_dense_replace=1,
    rope_interleave=False,
    gqa=GqaConfig(kv_heads=1, head_dim=8, rotary=1.0, qk_norm=True),
    family="glm4_moe",
    eos_token_ids=(),
)
DFLASH = BlockConfig(layers=LAYERS, taps=(1, 2), block=5, mask=0)
# Three of four tokens are candidates.
HEADS = {
    "dflash": DFLASH,
    "dflash2": replace(DFLASH, convolution=(2, 8), selector=(2, V - 1)),
    "dspark": replace(DFLASH, block=4, anchored=True, markov=2, confidence=True),
}


def target(head: str) -> ModelConfig:
    return replace(CFG.with_nextn(()), drafter=HEADS[head])


@pytest.mark.parametrize(
    ("head", "verifier", "grammar"),
    [
        pytest.param("dflash2", "rejection", False, marks=pytest.mark.rest),
        *(pytest.param(head, "rejection", False, marks=pytest.mark.slow) for head in ("dflash", "dspark")),
        *(pytest.param(head, "block", True, marks=pytest.mark.slow) for head in HEADS),
        *(pytest.param(head, "coupled", False, marks=pytest.mark.slow) for head in HEADS),
    ],
)
def test_lossless(head: str, verifier: str, grammar: bool):
    assert build(target(head)) == BlockDrafter(Blocks(target(head)))
    assert min(p_values(build(target(head)), target(head), verifier, grammar)) > 1e-4


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("dflash2", marks=pytest.mark.rest),
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("dflash", "dspark")),
    ],
)
def test_a_law_that_is_not_renormalised_shows(head: str):
    honest = Blocks(target(head))
    assert min(p_values(leaking(BlockDrafter)(honest), target(head), reader=BlockDrafter(honest))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_lossless_where_the_likeliest_drafts_are_verified(head: str):
    assert min(p_values(build(target(head)), target(head), kept=1)) > 1e-4
