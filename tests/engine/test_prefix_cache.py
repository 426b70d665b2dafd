"""A prompt that begins in the prefix cache, or is resumed after preemption, goes on as if computed whole.

Tokens and acceptance are compared with the plain loop, so a wrong hidden state at a page's end shows even
where only drafts depend on it.
"""

from dataclasses import replace

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.params import Params
from tests.engine.plain import compile_steps, reference, same_scores, scored_by, text, widest
from tests.models import GREEDY, TINY, accepted, finish, make_engine, prompts, rigged, serve

LONG = prompts(1, shortest=40)[0]
TWO_LAYERS = replace(TINY, num_nextn_predict_layers=2, nextn_moe=(True, False))
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=0)


rest = pytest.mark.rest


def one(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, exactly: bool = False) -> Request:
    return serve(engine, [(prompt, params)], exactly=exactly, compiled=True)[0]


@pytest.mark.parametrize("tokens", [32, 33, *(pytest.param(n, marks=rest) for n in (16, 17, 31, 40))])
def test_tokens_and_acceptance_after_a_hit(tokens):
    engine = widest()
    one(engine, LONG)
    prompt = LONG[:tokens]
    again = one(engine, prompt)
    told = reference().speculate(prompt, 24, 3)
    assert again.progress.cached_tokens == (tokens - 1) // 16 * 16
    assert again.progress.output == told.ids
    assert accepted(again) == told.accepted
    assert sum(told.accepted) > 0


@rest
@pytest.mark.parametrize(
    "params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_two_nextn_layers_go_on_from_cached_pages(params):
    weights: Params = rigged(TWO_LAYERS)
    cold = make_engine(weights, TWO_LAYERS, prefix_cache=False)
    warm = make_engine(weights, TWO_LAYERS)
    one(warm, LONG, params, exactly=True)
    want, got = (one(engine, LONG, params, exactly=True) for engine in (cold, warm))
    assert (got.progress.cached_tokens, want.progress.cached_tokens) == (32, 0)
    assert (got.progress.output, accepted(got)) == (want.progress.output, accepted(want))
    assert sum(accepted(got)) > 0
    same_scores(got, want, TWO_LAYERS, weights)


@pytest.mark.parametrize("depth", [0, 3])
def test_pages_of_generated_tokens_are_found_too(depth):
    """A conversation: the next prompt begins with this prompt and its answer, drafted or not.

    A step that can make no drafts defers the drafter's entries.
    """
    engine, params = widest(), replace(GREEDY, num_speculative_tokens=depth)
    if depth == 0:
        compile_steps(engine, LONG, params, 4)
    first = serve(engine, [(LONG[:20], params)], compiled=True)[0]
    prompt = [*LONG[:20], *first.progress.output, 5, 9]
    second = one(engine, prompt, replace(GREEDY, max_tokens=8))
    told = reference().speculate(prompt, 8, 3)
    assert second.progress.cached_tokens == 32  # 20 + 24 - 1 rows are complete
    assert second.progress.output == told.ids
    assert accepted(second)[: len(told.accepted)] == told.accepted
    assert sum(told.accepted) > 0


def test_hits_are_the_same_with_and_without_speculation():
    jobs = [([*LONG[:n], 3, n], replace(GREEDY, max_tokens=9)) for n in (5, 16, 33, 40, 33, 16, 40)]
    hits = []
    for depth in (0, 1, 3):
        engine = widest()
        asked = [(prompt, replace(params, num_speculative_tokens=depth)) for prompt, params in jobs]
        requests = [serve(engine, [job], compiled=True)[0] for job in asked]
        hits.append([r.progress.cached_tokens for r in requests])
        assert engine.stats().prefix_hits == sum(hits[-1])
        assert engine.stats().prefix_queries == sum(len(p) for p, _ in jobs)
        assert not depth or sum(r.progress.speculation.accepted for r in requests) > 0
    assert hits[0] == hits[1] == hits[2]
    assert sum(hits[0]) > 100


def test_salts_do_not_share():
    engine = widest()
    seen = []
    for salt in ("", "mine", "mine", ""):
        request = engine.make_request(LONG, GREEDY, cache_salt=salt)
        engine.submit(request)
        finish(engine)
        seen.append(request.progress.cached_tokens)
    assert seen == [0, 0, 32, 32]


def test_flushing_forgets():
    engine = widest()
    one(engine, LONG)
    engine.flush_prefix_cache()
    assert engine.stats().pages_cached == 0
    assert one(engine, LONG).progress.cached_tokens == 0


def test_prompt_logprobs_after_a_hit_are_those_of_the_whole_prompt():
    engine, params = widest(), replace(GREEDY, prompt_logprobs=0)
    _, request = (one(engine, LONG, p) for p in (GREEDY, params))
    assert request.progress.cached_tokens == 0
    scored_by(reference(), request)


# Preemption


def crowd(params: SamplingParams, **config) -> tuple[Engine, list[Request]]:
    """Four requests that need four pages each when they end, and six pages."""
    engine = widest(num_pages=6, **config)
    return engine, serve(engine, [(p, params) for p in prompts(4, shortest=14)], compiled=True)


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=rest)])
@pytest.mark.parametrize("depth", [pytest.param(0, marks=rest), 3])
def test_preempted_requests_end_as_if_nothing_had_happened(prefix_cache, depth):
    params = replace(GREEDY, max_tokens=30, num_speculative_tokens=depth)
    engine, requests = crowd(params, prefix_cache=prefix_cache)
    assert engine.stats().preemptions == sum(r.residence.preemptions for r in requests) > 0
    for r in requests:
        assert r.progress.output == text(r.prompt, 30)
        scored_by(reference(), r)
    assert engine.stats().pages_used == 0
    if depth:
        alone = [one(widest(), list(r.prompt), params) for r in requests]
        assert [accepted(r) for r in requests] == [accepted(r) for r in alone]
        assert sum(sum(accepted(r)) for r in requests) > 0


def test_preempted_prompts_are_scored_once():
    engine = widest(num_pages=6)
    params = replace(GREEDY, max_tokens=30, prompt_logprobs=0)
    requests = serve(engine, [(p, params) for p in prompts(4, shortest=14)], compiled=True)
    assert engine.stats().preemptions > 0
    assert sum(r.progress.speculation.accepted for r in requests) > len(requests)
    for r in requests:
        scored_by(reference(), r)


@pytest.mark.slow
def test_preemption_changes_no_sampled_token():
    params = replace(SAMPLED, max_tokens=30, presence_penalty=0.3, min_tokens=20)
    engine, requests = crowd(params)
    calm = serve(widest(), [(r.prompt, params) for r in requests], compiled=True)
    assert engine.stats().preemptions > 0
    assert [r.progress.output for r in requests] == [r.progress.output for r in calm]
    assert [accepted(r) for r in requests] == [accepted(r) for r in calm]


def test_the_more_important_request_keeps_its_pages():
    engine = widest(num_pages=6)
    params = replace(GREEDY, max_tokens=30)
    requests = [engine.make_request(p, params, priority=-i) for i, p in enumerate(prompts(4, shortest=14))]
    for r in requests:
        engine.submit(r)
    finish(engine)
    assert requests[3].residence.preemptions == 0 < requests[2].residence.preemptions
    assert all(r.progress.output == text(r.prompt, 30) for r in requests)


def test_aborting_a_preempted_request():
    engine = widest(num_pages=6)
    params = replace(GREEDY, max_tokens=30)
    requests = [engine.make_request(p, params) for p in prompts(4, shortest=14)]
    for r in requests:
        engine.submit(r)
    while not (victims := [r for r in requests if r.residence.preemptions and not r.finished]):
        engine.step()
    victim = victims[0]
    engine.abort(victim)
    finish(engine)
    assert victim.progress.finish_reason == "abort"
    others = [r for r in requests if r is not victim]
    assert all(r.progress.output == text(r.prompt, 30) for r in others)
    assert engine.stats().pages_used == 0
