"""An engine that drafts by blocks: the oracle's text and acceptance, however it runs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.model.sharding import make_mesh
from tests.golden import BLOCKS, expected, model_dir
from tests.models import accepted, make_engine, on_mesh, serve

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@cache
def loaded(variant: str) -> Loaded:
    return load(model_dir(variant), model_dir(variant, "draft"), dtype="float32")


def engine_of(variant: str, **config: Any) -> Engine:
    """Pages and chunks of 16 tokens: prompts of the oracle, of 32, take two of either."""
    found = loaded(variant)
    return make_engine(found.params, found.config, **{"num_speculative_tokens": 4, **config})


def job(variant: str, depth: int, tokens: int = 32) -> tuple[list[int], SamplingParams]:
    prompt = expected(variant)["input_ids"].tolist()
    return prompt[:tokens], replace(GREEDY, num_speculative_tokens=depth)


def told(requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    return [(r.progress.output, accepted(r)) for r in requests]


@pytest.mark.parametrize("variant", BLOCKS)
def test_drafts_text_and_acceptance_are_the_oracles(variant: str):
    """From chunks and from cached pages; of the latter also where steps without drafts have left them."""
    engine, want = engine_of(variant, max_num_seqs=1), expected(variant)
    first, ids, _ = propose(engine, job(variant, 4)[0], 4)
    assert first == want["greedy_ids"][0]
    assert ids.tolist() == want["draft_ids"].tolist()
    engine.flush_prefix_cache()
    for depth in (4, 3, 2, 1):
        (request,) = serve(engine, [job(variant, depth)], exactly=depth == 4, compiled=True)
        assert request.progress.cached_tokens == (0 if depth == 4 else 16)
        assert request.progress.output == want[f"spec_ids.{depth}"].tolist() == want["greedy_ids"].tolist()
        assert accepted(request) == want[f"spec_accept.{depth}"].tolist()
        assert sum(accepted(request)) > 3


def crowd(variant: str, shortest: int) -> list[tuple[list[int], SamplingParams]]:
    return [job(variant, 3, tokens) for tokens in range(shortest, shortest + 8, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", BLOCKS)
def test_pages_that_steps_without_drafts_left_draft_as_well(variant: str):
    engine, want = engine_of(variant, max_num_seqs=1), expected(variant)
    serve(engine, [job(variant, 0)], exactly=True)
    prompt, params = job(variant, 3)
    longer = ([*prompt, *want["greedy_ids"][:17].tolist()], params)
    (hit,) = serve(engine, [longer])
    engine.flush_prefix_cache()
    (cold,) = serve(engine, [longer], compiled=True)
    assert (hit.progress.cached_tokens, cold.progress.cached_tokens) == (48, 0)
    assert told([hit]) == told([cold])
    assert sum(accepted(hit)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", BLOCKS)
def test_preemption_changes_nothing(variant: str):
    engine = engine_of(variant, num_pages=6)
    jobs = [(prompt, replace(params, max_tokens=40)) for prompt, params in crowd(variant, 14)]
    requests, alone = serve(engine, jobs), [serve(engine_of(variant), [each])[0] for each in jobs]
    assert engine.stats().preemptions > 0
    assert told(requests) == told(alone)
    assert sum(map(sum, map(accepted, requests))) > 10


@pytest.mark.slow
@pytest.mark.parametrize("variant", BLOCKS)
def test_a_mesh_changes_nothing(variant: str):
    found, mesh = loaded(variant), make_mesh(2, 2)
    params = on_mesh(found.params, mesh, found.config)
    engine = make_engine(params, found.config, mesh, num_speculative_tokens=4)
    requests = serve(engine, crowd(variant, 26))
    assert told(requests) == told(serve(engine_of(variant), crowd(variant, 26)))
    assert sum(map(sum, map(accepted, requests))) > 10


@pytest.mark.slow
@pytest.mark.parametrize("variant", BLOCKS)
@pytest.mark.parametrize("config", [{"suffix_drafts": True}, {"kv_cache_dtype": "fp8"}], ids=repr)
def test_matches_before_blocks_and_an_fp8_cache_change_no_text(variant: str, config: dict[str, Any]):
    engine = engine_of(variant, **config)
    jobs = crowd(variant, 26)
    drafted, plain = (
        serve(engine, jobs),
        serve(engine, [(p, replace(s, num_speculative_tokens=0)) for p, s in jobs]),
    )
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert sum(map(sum, map(accepted, drafted))) > 5


@pytest.mark.slow
@pytest.mark.parametrize("variant", BLOCKS)
def test_pages_that_went_to_the_host_come_back_with_the_heads_keys_and_values(variant: str):
    engine, want = engine_of(variant, max_num_seqs=1, num_pages=6, host_cache_gib=0.01), expected(variant)
    prompt, params = job(variant, 3)
    serve(engine, [(prompt, params)], exactly=True)
    for step in (-1, -2):
        serve(engine, [(prompt[::step], params)], exactly=True)
    (request,) = serve(engine, [(prompt, params)], compiled=True)
    assert engine.stats().hits_by_tier["host"] == request.progress.cached_tokens == 16
    assert request.progress.output == want["greedy_ids"].tolist()
    assert accepted(request) == want["spec_accept.3"].tolist()


def test_a_block_has_no_more_drafts():
    with pytest.raises(ConfigError, match="a block of this DFlash head has 4 drafts; use 4 or less"):
        engine_of("dflash", num_speculative_tokens=5)
