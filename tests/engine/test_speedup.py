"""The realised speed-up: told what steps took, it says what drafting gained, or nothing."""

import pytest

from mtp_jax.engine.request import SamplingParams
from mtp_jax.engine.speedup import Speedup
from tests.models import make_engine, prompts, serve


def add(speedup, steps, depth, seconds, tokens, bucket="b8"):
    for _ in range(steps):
        speedup.add(bucket, depth, seconds, tokens)


def test_tokens_over_what_they_would_have_taken():
    speedup = Speedup()
    add(speedup, 3, 0, 1.0, 1.0)
    assert speedup.value == 1
    add(speedup, 6, 3, 2.0, 3.0)
    assert speedup.value == pytest.approx((3 * 1 + 6 * 3) / (3 * 1 + 6 * 2))


def test_hiccups_change_nothing():
    speedup = Speedup()
    add(speedup, 4, 0, 1.0, 1.0)
    add(speedup, 1, 0, 90.0, 1.0)
    add(speedup, 1900, 3, 2.0, 3.0)
    add(speedup, 10, 3, 90.0, 3.0)
    assert speedup.value == pytest.approx(1.5, abs=0.01)


def test_nothing_is_said_until_depth_0_is_known():
    speedup = Speedup()
    assert speedup.value is None
    add(speedup, 30, 3, 2.0, 3.0)
    add(speedup, 2, 0, 1.0, 1.0)
    assert speedup.value is None  # two are not enough
    add(speedup, 1, 0, 1.0, 1.0)
    assert speedup.value == pytest.approx(1.5, abs=0.05)


def test_other_buckets_say_nothing():
    speedup = Speedup()
    add(speedup, 9, 0, 1.0, 1.0, "b1")
    add(speedup, 90, 3, 2.0, 3.0, "b8")
    assert speedup.value is None


def test_other_buckets_count_as_much_as_they_took():
    speedup = Speedup()
    add(speedup, 30, 0, 1.0, 1.0, "b1")
    add(speedup, 10, 3, 2.0, 3.0, "b8")
    assert speedup.value == 1
    add(speedup, 10, 3, 2.0, 3.0, "b8")
    assert speedup.value is None


def test_what_is_old_is_forgotten():
    speedup = Speedup(window=100)
    add(speedup, 5, 0, 1.0, 1.0)
    add(speedup, 90, 3, 2.0, 3.0)
    assert speedup.value == pytest.approx(1.5, abs=0.05)
    add(speedup, 100, 3, 2.0, 3.0)
    assert speedup.value is None
    add(speedup, 5, 0, 4.0, 1.0)  # the machine is slower now
    add(speedup, 95, 3, 8.0, 3.0)
    assert speedup.value == pytest.approx(1.5, abs=0.05)


def test_an_engine_says_nothing_until_some_steps_had_no_drafts():
    engine = make_engine(max_model_len=128)
    drafting = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, num_speculative_tokens=0)
    serve(engine, [(prompts(1)[0], drafting)])
    assert engine.stats().realised_speedup is None
    serve(engine, [(prompts(1)[0], plain)])
    serve(engine, [(prompts(1)[0], drafting)])
    found = engine.stats().realised_speedup
    assert found is not None
    assert found > 0
