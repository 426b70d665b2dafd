"""Sampling with other attention than MLA's: chi-square of whole steps against the exact law."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.heads.blocks.drafts import BlockDrafter
from mtp_jax.heads.build import build
from mtp_jax.heads.stages.drafts import Stages
from mtp_jax.model.config import IndexerConfig
from tests import v4
from tests.decode.helpers import leaking
from tests.decode.law import CFG, Case, chi_square, emitted, exact_law, fits
from tests.models import gqa

# Of three prompt tokens and those that follow each token attends to three.
INDEX = IndexerConfig(heads=4, dim=8, topk=3, shared=(False, True))
SPARSE = replace(CFG, indexer=INDEX)
GQA = gqa(CFG, kv_heads=1)
V4, STAGED = (
    replace(
        made(
            num_hidden_layers=2, compress_ratios=[4, 128, 0], vocab_size=4, hidden_size=32, index_topk=2,
            num_hash_layers=1, sliding_window=6, **more,
        ),
        eos_token_ids=(),
    )
    for made, more in (
        (v4.model, {}),
        (v4.staged, {"n_mtp_layers": 1, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [0, 1]}),
    )
)  # fmt: skip
SHARING = replace(CFG, indexer=replace(INDEX, share_drafts=True))


def check(cfg, verifier):
    case = Case(build(cfg), cfg=cfg)
    got = emitted("sampled", verifier, False, case)
    assert got.accepted.sum() / got.drafted.sum() > 0.2
    found = fits(got, case)
    assert min(found.values()) > 1e-4, found


@pytest.mark.parametrize(
    ("cfg", "verifier"),
    [
        pytest.param(SPARSE, "block", id="sparse-block", marks=pytest.mark.rest),
        pytest.param(GQA, "coupled", id="gqa-coupled", marks=pytest.mark.slow),
        pytest.param(SPARSE, "coupled", id="sparse-coupled", marks=pytest.mark.slow),
        pytest.param(GQA, "block", id="gqa-block", marks=pytest.mark.slow),
    ],
)
def test_lossless(cfg, verifier):
    check(cfg, verifier)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "coupled"])
@pytest.mark.parametrize("cfg", [pytest.param(V4, id="mtp"), pytest.param(STAGED, id="dspark")])
def test_lossless_with_windows_and_entries(cfg, verifier):
    """Entries end among the tokens that are drawn, and of three a token attends to two."""
    case = Case(build(cfg), tuple(k % 4 for k in range(10)), 1000, 128, cfg)
    got = emitted("sampled", verifier, False, case)
    assert got.accepted.sum() / got.drafted.sum() > 0.2
    found = fits(got, case)
    assert min(found.values()) > 1e-4, found
    other = replace(cfg, compressed=replace(cfg.compressed, window=4))
    assert chi_square(got.tokens[: case.rows], exact_law("plain", False, case.prompt, other)) < 1e-4


@pytest.mark.slow
def test_a_law_of_stages_that_is_not_renormalised_shows():
    case = Case(leaking(BlockDrafter)(Stages(STAGED)), (0, 1, 2), 1000, 128, STAGED)
    got = emitted("sampled", "rejection", False, case)
    assert chi_square(got.tokens[: case.rows], exact_law("plain", False, case.prompt, STAGED)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "coupled", "rejection"])
def test_lossless_where_drafts_share_a_choice(verifier):
    check(SHARING, verifier)


@pytest.mark.rest
def test_it_is_another_law_than_that_of_dense_attention():
    case = Case(build(SPARSE), cfg=SPARSE)
    got = emitted("sampled", "block", False, case)
    dense = replace(CFG, indexer=replace(INDEX, topk=64))
    assert chi_square(got.tokens[: case.rows], exact_law("plain", False, case.prompt, dense)) < 1e-4
    np.testing.assert_array_less(got.tokens, CFG.vocab_size)
