"""Every launch is measured by itself, and each pays for what it caused."""

from typing import Any

import pytest

from mtp_jax.decode.arrays import Result
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.timings import Timings
from tests.engine.device import Device, on_device
from tests.models import finish, prompts


class Clock:
    """Stands still until something takes time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Device, "clock", clock)
    return clock


def test_a_launch_begins_when_the_one_before_it_ends(clock):
    timings = Timings(clock)
    first = second = clock.now
    clock.now += 2
    assert timings.ended(first) == 2
    clock.now += 1
    assert timings.ended(second) == 1
    clock.now += 5
    third = clock.now
    clock.now += 3
    assert timings.ended(third) == 3


def test_a_flush_is_charged_to_the_steps_that_caused_it(clock, monkeypatch):
    """Not to the launch that it precedes: a look at a deeper step would seem to cost it all."""
    engine, device = on_device(max_num_seqs=1)
    read, learned = Device.read, []
    learn = engine.depth.learn

    def takes(seconds: float) -> None:
        clock.now += seconds

    def takes_a_quarter(*given: Any) -> Result:
        takes(0.25)
        return read(*given)

    def record(key: Any, seconds: float, *rest: Any) -> None:
        learned.append((key.depth, seconds))
        learn(key, seconds, *rest)

    monkeypatch.setattr(Device, "read", takes_a_quarter)
    monkeypatch.setattr(device, "_launch_flush", lambda: lambda: takes(4))
    monkeypatch.setattr(engine.depth, "learn", record)

    def run(depth: int) -> list[tuple[int, float]]:
        params = SamplingParams(temperature=0, max_tokens=8, num_speculative_tokens=depth)
        request = engine.make_request(prompts(1)[0], params)
        engine.prepare([request])
        learned.clear()
        engine.submit(request)
        finish(engine)
        assert learned
        return list(learned)

    assert set(run(0)) == {(0, 0.25)}
    for _ in range(2):  # the first flush, of the rehearsal, says little
        assert set(run(3)) == {(3, 0.25)}
        assert set(run(0)) == {(0, 0.25 + 4 / 7)}
    seconds = engine.stats().step_seconds
    assert seconds[3] == pytest.approx(0.25 * engine.stats().depth_steps[3])
