"""The phases of a running engine's steps: the shares of a short trace, times the measured seconds."""

import threading
import time

import jax
import pytest

from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine.request import SamplingParams
from mtp_jax.engine.stats import UNPROFILED, Counters
from mtp_jax.profiling import live
from mtp_jax.profiling.live import PhaseProfiler, shares
from mtp_jax.profiling.scopes import STEP_PHASES, Scope
from mtp_jax.profiling.trace import Op, Trace
from tests.models import make_engine, prompts, serve

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_shares_are_of_one_program():
    ops = (
        Op(10, 20, "jit_step", "a", 1),
        Op(20, 50, "jit_step", "b", 1),
        Op(52, 62, "jit_step", "unknown", 1),
        Op(70, 90, "jit_prefill", "a", 2),
    )
    scopes = {"a": Scope("draft", "MLP"), "b": Scope("verify", "attention")}
    assert shares(Trace(0, 100, (ops,)), "jit_step", scopes) == {"draft": 0.2, "verify": 0.6, "other": 0.2}


def test_phases_sum_to_the_time_of_the_steps():
    counters = Counters()
    counters.stepped("program", 3, 2.0)
    counters.phase_shares["program"] = {"draft": 0.25, "verify": 0.75}
    counters.stepped("program", 3, 4.0)
    counters.stepped("another", 0, 1.0)
    assert counters.phase_seconds == {UNPROFILED: 3.0, "draft": 1.0, "verify": 3.0}
    assert sum(counters.phase_seconds.values()) == sum(counters.depth_seconds.values())


@pytest.fixture
def busy(monkeypatch):
    """An engine that serves the same prompt for ever, in a thread of its own."""
    monkeypatch.setattr(live, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(live, "_COMMON", 5)
    engine, stop = make_engine(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            serve(engine, [(prompts(1)[0], GREEDY)])

    thread = threading.Thread(target=run)
    thread.start()
    yield engine
    stop.set()
    thread.join()


def test_a_running_engine_learns_its_phases(busy):
    ready = threading.Event()
    with PhaseProfiler(busy, ready.is_set):
        time.sleep(0.3)
        assert not busy.counters.phase_shares
        ready.set()
        end = time.monotonic() + 120
        while not busy.counters.phase_shares and time.monotonic() < end:
            time.sleep(0.05)
        ((key, found),) = busy.counters.phase_shares.items()
        while busy.stats().phase_seconds.keys() == {UNPROFILED} and time.monotonic() < end:
            time.sleep(0.05)
    assert key.depth == 3
    assert sum(found.values()) == pytest.approx(1)
    assert set(STEP_PHASES) <= found.keys() <= {*STEP_PHASES, "other"}
    assert min(found["draft"], found["verify"]) > 0.02
    assert found.get("other", 0) < 0.2
    stats = busy.stats()
    assert sum(stats.phase_seconds.values()) == pytest.approx(sum(stats.step_seconds.values()), rel=0.05)
    assert stats.phase_seconds["verify"] > 0


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def traced(engine, seconds_of_steps, monkeypatch):
    """Steps of every program that a trace lasted for, and whether each got its shares."""
    keys = {name: StepKey(1, depth, 1, SamplingMode()) for depth, name in enumerate(seconds_of_steps)}
    clock = Clock()

    def steps() -> dict[StepKey, int]:
        return {keys[name]: 100 + int(clock.now / seconds) for name, seconds in seconds_of_steps.items()}

    profiler = PhaseProfiler(engine, lambda: True)
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(profiler, "_steps", steps)
    monkeypatch.setattr(live.trace, "read", lambda file, window: None)
    monkeypatch.setattr(live, "shares", lambda found, module, scopes: {"draft": 1.0})
    monkeypatch.setattr(engine.executables, "program", lambda key: jax.jit(abs).lower(1.0).compile())
    profiler._profile(keys["traced"])
    known = engine.counters.phase_shares
    return {name: (steps()[key] - 100, key in known) for name, key in keys.items()}


def test_a_program_that_hardly_ran_in_a_trace_gets_no_shares_from_it(monkeypatch):
    found = traced(make_engine(), {"traced": 0.1, "rare": 0.4, "other": 0.15}, monkeypatch)
    assert found == {"traced": (5, True), "rare": (1, False), "other": (3, True)}


def test_slow_steps_are_traced_for_longer(monkeypatch):
    assert traced(make_engine(), {"traced": 5.0}, monkeypatch)["traced"] == (live._ENOUGH, True)


def test_a_trace_ends_where_no_steps_are_taken_any_more(monkeypatch):
    assert traced(make_engine(), {"traced": 1e6}, monkeypatch)["traced"] == (0, False)


def test_a_profiler_that_is_taken_ends_nothing(busy, monkeypatch, caplog):
    def taken(*args, **options):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(live.jax.profiler, "trace", taken)
    with PhaseProfiler(busy, lambda: True):
        end = time.monotonic() + 60
        while caplog.text.count("could not be profiled") < live._TRIES and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
    assert caplog.text.count("could not be profiled") == live._TRIES
    assert not busy.counters.phase_shares
