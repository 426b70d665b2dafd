"""A pause of the engine: requests keep their tokens, wait without slots, and go on as if nothing was."""

from dataclasses import replace

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.device import on_device

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=0)
PROMPTS = [list(range(3, 3 + n)) for n in (5, 40, 12)]


def begun(params: SamplingParams = PARAMS, **config) -> tuple[Engine, list[Request]]:
    engine, _ = on_device(**{"num_speculative_tokens": 3, **config})
    requests = [engine.make_request(p, params) for p in PROMPTS]
    engine.prepare(requests)
    for request in requests:
        engine.submit(request)
    return engine, requests


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def result(request: Request) -> tuple:
    own = request.progress
    return own.output, own.finish_reason, own.logprobs, own.prompt_logprobs


CONFIGS = [{}, {"prefix_cache": False}, {"num_pages": 12}, {"shards": 2}, {"max_num_seqs": 1}]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7])
def test_a_pause_changes_no_answer(config, steps):
    engine, undisturbed = begun(**config)
    finish(engine)
    engine, requests = begun(**config)
    for _ in range(2):  # a pause, and one soon after it
        for _ in range(steps):
            engine.step()
        before = [list(r.progress.output) for r in requests]
        advanced = engine.pause()
        for request, old in zip(requests, before, strict=True):
            assert (request in advanced) == (request.progress.output != old)
            assert request.status in (Status.WAITING, Status.FINISHED)
        assert not engine.busy
        assert (engine.stats().pages_used, engine.stats().running) == (0, 0)
        assert engine.step() == []
        engine.scheduler.unpause()
    finish(engine)
    assert [result(r) for r in requests] == [result(r) for r in undisturbed]
    assert engine.stats().preemptions == 0 or "num_pages" in config


def test_requests_that_come_meanwhile_wait():
    engine, requests = begun()
    engine.pause()
    late = engine.make_request([7, 8], PARAMS)
    engine.submit(late)
    assert (engine.busy, engine.step()) == (False, [])
    engine.scheduler.unpause()
    finish(engine)
    assert all(r.progress.finish_reason == "length" for r in (*requests, late))


def test_kept_requests_may_be_aborted():
    engine, requests = begun()
    for _ in range(4):
        engine.step()
    engine.pause()
    tokens = [list(r.progress.output) for r in requests]
    assert any(tokens)
    for request in requests:
        engine.abort(request)
        assert request.progress.finish_reason == "abort"
    assert [r.progress.output for r in requests] == tokens
    engine.scheduler.unpause()
    assert not engine.busy
    assert engine.stats().waiting == 0


def test_a_deadline_waits_for_the_end_of_a_pause():
    engine, _ = begun()
    late = engine.make_request([7, 8], PARAMS, timeout=1e-9)
    engine.submit(late)
    engine.pause()
    assert engine.step() == []
    engine.scheduler.unpause()
    assert late in engine.step()
    assert late.progress.finish_reason == "timeout"


def test_a_request_names_the_weights_that_it_ran_with_last():
    engine, (first, *_) = begun()
    for _ in range(4):
        engine.step()
    engine.pause()
    engine.new_weights("new")
    assert first.progress.weight_version == "0"
    engine.scheduler.unpause()
    finish(engine)
    assert first.progress.weight_version == "new"


def test_scores_of_a_prompt_are_of_one_model():
    """They are computed anew for a prompt that was read in part."""
    engine, requests = begun(replace(PARAMS, max_tokens=2))
    while not any(r.progress.prompt_logprobs and not r.progress.output for r in requests):
        engine.step()
    engine.pause()
    engine.new_weights("new")
    assert not any(r.progress.prompt_logprobs for r in requests if not r.progress.output)
    engine.scheduler.unpause()
    finish(engine)
    assert [len(r.progress.prompt_logprobs) for r in requests] == [len(p) for p in PROMPTS]


def test_without_memory_the_device_is_told_nothing():
    engine, requests = begun()
    engine.step()
    engine.pause()
    engine.sleep()
    engine.abort(requests[0])
    launched: list[object] = []
    do, engine.runner.do = engine.runner.do, lambda *a, **k: launched.append(a)  # type: ignore
    engine.step()
    assert not launched
    engine.runner.do = do  # type: ignore[method-assign]
    engine.wake()
    engine.scheduler.unpause()
    finish(engine)
    assert [r.progress.finish_reason for r in requests] == ["abort", "length", "length"]
