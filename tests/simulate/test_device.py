"""The simulated device by itself: its language, its time, and what it refuses."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtp_jax.decode.keys import PageKey, SamplingMode, StepKey
from mtp_jax.decode.launches import Launch, MoveExpert, ReadExperts, ReadPages, ReleaseCache, StepLaunch
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.language import Language, mix
from mtp_jax.simulate.memory import SlotMemory, Violation
from tests.engine.device import on_device
from tests.models import finish

SAY = Language(50, (0.8, 0.3), seed=3, ends=(1,), end_rate=0.1)
STATES = [mix(i) for i in range(4000)]


def near(count: int, of: int, rate: float) -> bool:
    return abs(count / of - rate) <= 4 * math.sqrt(rate * (1 - rate) / of)


def test_ends_and_right_drafts_come_as_often_as_they_should():
    assert near(sum(SAY.next(h) == 1 for h in STATES), len(STATES), 0.1)
    for k, rate in enumerate((0.8, 0.3, 0.3)):  # the last one holds for all further drafts
        assert near(sum(SAY.right(h, k) for h in STATES), len(STATES), rate)


def test_a_row_that_samples_draws_ranks_of_the_distribution():
    say = replace(SAY, end_rate=0.0)
    ranks = [say.rank(h, say.next(h, heat=7)) for h in STATES]
    for rank in range(3):
        assert near(ranks.count(rank), len(ranks), math.exp(say.logprob(rank)))
    assert [say.next(h, 7) for h in STATES[:50]] != [say.next(h, 8) for h in STATES[:50]]


def test_logits_ranks_and_the_likeliest_tokens_agree():
    for h in STATES[:50]:
        order = SAY.likeliest(h, 5)
        assert [SAY.rank(h, t) for t in order] == [*range(5)]
        assert order[0] == SAY.next(h)
        assert SAY.logits(h)[order].tolist() == [0, -1, -2, -3, -4]


def test_a_language_needs_words_and_probabilities():
    with pytest.raises(ConfigError, match="has no words"):
        Language(2, ends=(0, 1))
    with pytest.raises(ConfigError, match="expected probabilities"):
        Language(9, (1.5,))


def test_a_step_takes_its_time_after_the_one_before_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(Simulated, "clock", staticmethod(lambda: now[0]))
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    device = Simulated(SAY, SlotMemory(1, 4, 4, 1), seconds=0.25)
    key = StepKey(1, 0, 1, SamplingMode())
    device.compile([key])
    first, second = device.do(StepLaunch(key)), device.do(StepLaunch(key))
    assert now == [100.0]
    first.read()
    assert now == [100.25]
    second.read()
    assert now == [100.5]


def test_what_is_wrong_on_any_device_is_a_violation():
    engine, device = on_device()
    with pytest.raises(Violation, match="never compiled"):
        device.do(StepLaunch(StepKey(1, 0, 1, SamplingMode())))
    with pytest.raises(Violation, match="pages"):
        device.do(ReadPages(0, (engine.pages,)))
    request = engine.make_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=20))
    engine.prepare([request])
    engine.submit(request)
    while len(request.progress.output) < 3:
        engine.step()
    with pytest.raises(Violation, match="slots were in use"):
        device.do(ReleaseCache())
    narrow = StepKey(4, 3, 0, SamplingMode())
    device.compile([narrow])
    with pytest.raises(Violation, match="in 0 pages"):
        device.do(StepLaunch(narrow))


def test_it_has_no_experts():
    _, device = on_device()
    device.compile([PageKey(1)])
    asked: list[Launch[Any]] = [ReadExperts(), MoveExpert(0, 1, 0, np.zeros((1, 1), np.int32))]
    for launch in asked:
        with pytest.raises(TypeError, match="nothing is counted"):
            device.do(launch)


def test_the_same_text_at_every_depth():
    texts = []
    for depth in (0, 1, 3):
        engine, _ = on_device(keep=0.6, num_speculative_tokens=depth)
        params = SamplingParams(temperature=1, seed=4, max_tokens=30)
        request = engine.make_request([5, 6, 7], params)
        engine.prepare([request])
        engine.submit(request)
        finish(engine)
        texts.append(request.progress.output)
        assert (request.progress.speculation.accepted > 3) == (depth > 0)
    assert texts[0] == texts[1] == texts[2]
