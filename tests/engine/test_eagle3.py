"""An engine that drafts with EAGLE-3 heads: the oracle's drafts, text and acceptance, however it runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import load
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.head_config import Eagle3Config
from mtp_jax.model.params import init_params
from mtp_jax.model.sharding import make_mesh
from tests.eagle3 import forward, loaded
from tests.golden import EAGLES, expected, model_dir
from tests.models import accepted, make_engine, on_mesh, serve

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def engine_of(variant: str, **config: Any) -> Engine:
    """Pages and chunks of 16 tokens: prompts of the oracle, of 32, take two of either."""
    found = loaded(variant)
    return make_engine(found.params, found.config, **{"num_speculative_tokens": 5, **config})


def job(variant: str, depth: int, tokens: int = 32) -> tuple[list[int], SamplingParams]:
    prompt = expected(variant)["input_ids"].tolist()
    return prompt[:tokens], replace(GREEDY, num_speculative_tokens=depth)


def told(requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    return [(r.progress.output, accepted(r)) for r in requests]


@pytest.mark.parametrize("variant", EAGLES)
def test_drafts_text_and_acceptance_are_the_oracles(variant: str):
    """From chunks and from cached pages; of the latter also where steps without drafts have left them."""
    engine, want = engine_of(variant, max_num_seqs=1), expected(variant)
    first, ids, logits = propose(engine, job(variant, 5)[0], 5)
    assert first == want["greedy_ids"][0]
    assert ids.tolist() == want["draft_rec_ids"].tolist()
    head = logits[np.isfinite(logits)].reshape(5, -1)
    np.testing.assert_allclose(head, want["draft_rec_logits"], rtol=0, atol=2e-4)
    engine.flush_prefix_cache()
    for depth in (5, 3, 2, 1):
        (request,) = serve(engine, [job(variant, depth)], exactly=depth == 5, compiled=True)
        assert request.progress.cached_tokens == (0 if depth == 5 else 16)
        assert request.progress.output == want[f"spec_ids.{depth}"].tolist() == want["greedy_ids"].tolist()
        assert accepted(request) == want[f"spec_accept.{depth}"].tolist()
        assert sum(accepted(request)) > 5
    undrafted = engine_of(variant, max_num_seqs=1)
    (request,) = serve(undrafted, [job(variant, 0)], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    (request,) = serve(undrafted, [job(variant, 3)], compiled=True)
    assert request.progress.cached_tokens == 16
    assert accepted(request) == want["spec_accept.3"].tolist()
    prompt, params = job(variant, 3)
    longer = ([*prompt, *want["greedy_ids"][:17].tolist()], params)
    (hit,) = serve(undrafted, [longer], compiled=True)
    undrafted.flush_prefix_cache()
    (cold,) = serve(undrafted, [longer], compiled=True)
    assert (hit.progress.cached_tokens, cold.progress.cached_tokens) == (48, 0)
    assert told([hit]) == told([cold])
    assert sum(accepted(hit)) > 0


def crowd(variant: str, shortest: int) -> list[tuple[list[int], SamplingParams]]:
    return [job(variant, 3, tokens) for tokens in range(shortest, shortest + 8, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", EAGLES)
def test_preemption_changes_nothing(variant: str):
    engine = engine_of(variant, num_pages=6)
    jobs = [(prompt, replace(params, max_tokens=40)) for prompt, params in crowd(variant, 14)]
    requests, alone = serve(engine, jobs), [serve(engine_of(variant), [each])[0] for each in jobs]
    assert engine.stats().preemptions > 0
    assert told(requests) == told(alone)
    assert sum(map(sum, map(accepted, requests))) > 20


@pytest.mark.slow
@pytest.mark.parametrize("variant", EAGLES)
def test_a_mesh_changes_nothing(variant: str):
    found, mesh = loaded(variant), make_mesh(2, 2)
    params = on_mesh(found.params, mesh, found.config)
    engine = make_engine(params, found.config, mesh, num_speculative_tokens=5)
    requests = serve(engine, crowd(variant, 26))
    assert told(requests) == told(serve(engine_of(variant), crowd(variant, 26)))
    assert sum(map(sum, map(accepted, requests))) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "variant"), [("dsa_v32_rigged", EAGLES[1]), ("glm46", EAGLES[0])])
def test_a_head_beside_other_trunks(trunk: str, variant: str):
    """Random heads, of either shape: their drafts without a cache, and the trunk's own text."""
    head, found, want = (
        loaded(variant).config.drafter,
        load(model_dir(trunk), dtype="float32"),
        expected(trunk),
    )
    assert isinstance(head, Eagle3Config)
    layer = replace(head.layer, hidden_size=found.config.hidden_size)
    taps, ids = (1, 2, found.config.num_hidden_layers), want["input_ids"]
    cfg = replace(found.config.with_nextn(()), drafter=replace(head, layer=layer, taps=taps))
    own = init_params(cfg, jax.random.key(1)).drafter
    params = replace(found.params, nextn=(), drafter=own)
    engine = make_engine(params, cfg, max_num_seqs=1, num_speculative_tokens=5)
    first, drafts, logits = propose(engine, ids.tolist(), 5)
    plain = forward(params, cfg, ids, np.append(ids[1:], first))
    assert drafts.tolist() == plain["draft_ids"].tolist()
    np.testing.assert_allclose(logits, plain["draft_logits"], rtol=0, atol=2e-4)
    (request,) = serve(engine, [(ids.tolist(), GREEDY)], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    assert request.progress.speculation.drafted > 24


@pytest.mark.slow
@pytest.mark.parametrize("variant", EAGLES)
def test_pages_that_went_to_the_host_come_back_with_the_fused_state_at_their_end(variant: str):
    engine, want = engine_of(variant, max_num_seqs=1, num_pages=6, host_cache_gib=0.01), expected(variant)
    others = [(job(variant, 3)[0][::step], job(variant, 3)[1]) for step in (-1, -2)]
    serve(engine, [job(variant, 3)], exactly=True)
    for each in others:
        serve(engine, [each], exactly=True)
    (request,) = serve(engine, [job(variant, 3)], compiled=True)
    assert engine.stats().hits_by_tier["host"] == request.progress.cached_tokens == 16
    assert accepted(request) == want["spec_accept.3"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"suffix_drafts": True}, {"kv_cache_dtype": "fp8"}], ids=repr)
@pytest.mark.parametrize("variant", EAGLES)
def test_matches_and_an_fp8_cache_change_no_text(variant: str, config: dict[str, Any]):
    engine = engine_of(variant, max_num_seqs=1, **config)
    drafted, alone = (serve(engine, [job(variant, depth)], exactly=True)[0] for depth in (3, 0))
    assert drafted.progress.output == alone.progress.output
    assert sum(accepted(drafted)) > 5
