"""The step loop that everything which serves shares."""

from typing import Any

import pytest

from mtp_jax.api.completions import PromptState
from mtp_jax.api.session import Session
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.device import on_device

PARAMS = SamplingParams(temperature=0, max_tokens=9)


def session(**sizes: Any) -> Session:
    engine, _ = on_device(**sizes)
    return Session(engine)


def submit(s: Session, *params: SamplingParams) -> list[PromptState]:
    states = [PromptState(s.engine, None, [3, 4, 5], p) for p in params]
    s.engine.prepare([c.request for state in states for c in state.completions])
    for state in states:
        s.submit(state)
    return states


def test_a_step_gives_the_prompts_that_advanced():
    s = session()
    short, long = submit(s, SamplingParams(max_tokens=1), PARAMS)
    while not short.done:
        advanced = s.step()
    assert short in advanced
    while s.engine.busy:
        assert s.step() in ([], [long])
    assert [len(state.output().outputs[0].token_ids) for state in (short, long)] == [1, 9]
    assert not s._serving


def test_a_prompt_advances_once_however_many_completions_do():
    s = session()
    (state,) = submit(s, SamplingParams(n=3, max_tokens=9))
    seen = []
    while s.engine.busy:
        seen.append(s.step())
    assert all(len(advanced) <= 1 for advanced in seen)
    assert state.done
    assert [len(o.token_ids) for o in state.output().outputs] == [9] * 3


def test_a_failure_in_one_text_ends_that_request_alone(monkeypatch, caplog):
    s = session()
    bad, good = submit(s, PARAMS, PARAMS)
    monkeypatch.setattr(bad.completions[0], "advance", lambda engine: 1 / 0)
    while s.engine.busy:
        s.step()
    assert bad.output().outputs[0].finish_reason == "error"
    assert "ZeroDivisionError" in caplog.text
    assert (good.done, len(good.output().outputs[0].token_ids)) == (True, 9)


def test_what_is_left_of_a_prompt_is_aborted():
    s = session()
    ended, running = submit(s, SamplingParams(max_tokens=1), PARAMS)
    while not ended.done:
        s.step()
    assert s.abort(ended) == []
    assert s.abort(running) == [running]
    assert (running.done, running.output().outputs[0].finish_reason) == (True, "abort")
    assert s.abort(running) == []
    assert not s.engine.busy


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("pages", [16, 5])
def test_an_abort_between_acceptance_and_text(steps, pages):
    """Tokens that the engine has accepted and no output has held yet all belong to the last one."""
    s = session(num_pages=pages, num_speculative_tokens=3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    states = submit(s, params, params)
    for _ in range(3):
        s.step()
    for _ in range(steps):
        s.engine.step()  # of which the session sees nothing
    for state in states:
        (request,) = (c.request for c in state.completions)
        accepted = [*request.progress.output]
        s.abort(state)
        (c,) = state.output().outputs
        assert c.finish_reason == "abort"
        assert c.token_ids == accepted
        lengths = {c.num_tokens, *map(len, (c.token_ids, c.logprobs or [], c.token_texts, c.drafted))}
        assert lengths == {len(accepted)}
        assert [next(iter(scores)) for scores in c.logprobs or []] == accepted
    assert s.engine.stats().pages_used == 0
    assert not s.engine.busy


def test_requests_without_text_run_to_their_end_and_others_may_follow():
    s = session()
    first, second = (s.engine.make_request([3, 4, 5], PARAMS) for _ in range(2))
    s.engine.prepare([first, second])
    for advanced in s.run([first]):
        if first in advanced and first.finished and not second.progress.output:
            s.engine.submit(second)
    assert [len(r.progress.output) for r in (first, second)] == [9, 9]


def test_a_run_that_is_left_aborts_its_requests():
    s = session()
    requests = [s.engine.make_request([3, 4, 5], PARAMS) for _ in range(6)]
    s.engine.prepare(requests)
    run = s.run(requests)
    next(run)
    run.close()
    assert [r.progress.finish_reason for r in requests] == ["abort"] * 6
    assert not s.engine.busy
    with pytest.raises(StopIteration):
        next(run)
