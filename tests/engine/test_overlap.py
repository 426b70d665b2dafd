"""Invariant *no host in the loop*: the host launches the next step before it reads this one.

The device is a stand-in whose state holds nothing: any look at it fails.
"""

import itertools
from typing import Any

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.device import Device, on_device
from tests.models import finish, prompts

PARAMS = SamplingParams(temperature=0, max_tokens=20)


def start(count: int = 1, max_tokens: int = 20, **device: Any) -> tuple[Engine, Device, list[Request]]:
    engine, fake = on_device(**device)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    requests = [engine.make_request(p, params) for p in prompts(count)]
    engine.prepare(requests)
    fake.log.clear()  # of the rehearsal
    for r in requests:
        engine.submit(r)
    return engine, fake, requests


def test_every_result_is_read_a_launch_later():
    engine, device, (request,) = start()
    finish(engine)
    assert request.progress.finish_reason == "length"
    steps = [entry.removeprefix("launch ") for entry in device.log if entry.startswith("launch step")]
    assert len(steps) > 3
    for this, following in itertools.pairwise(steps[:-4]):  # the last ones may be the end, and are read first
        assert device.log.index(f"launch {following}") < device.log.index(f"read {this}")
    assert all(device.log.count(f"read {s}") == 1 for s in steps)


def test_few_results_wait():
    engine, device, _ = start(6, stop=0.05)
    while engine.busy:
        engine.step()
        launched = sum(e.startswith("launch") for e in device.log)
        read = sum(e.startswith("read") for e in device.log)
        assert launched - read <= 1, "one launch goes out per turn, and the one before it is read"


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_no_step_is_launched_that_cannot_emit(tokens):
    """Every step emits a token at least, so a row that accepts nothing takes exactly max_tokens - 1 steps."""
    engine, device, (request,) = start(max_tokens=tokens, keep=0.0)
    finish(engine)
    assert len(request.progress.output) == tokens
    assert sum(e.startswith("launch step") for e in device.log) == tokens - 1


def test_a_first_token_is_read_while_the_step_behind_it_runs():
    engine, device, (request,) = start()

    def seen() -> list[str]:
        return [e.rpartition(" ")[0] for e in device.log]

    assert engine.step() == []
    assert engine.step() == [request]
    assert seen() == ["launch prefill", "launch step", "read prefill"]
    assert len(request.progress.output) == 1


def test_a_stop_costs_a_step_in_vain_at_most():
    """The step after the first token goes out before that is read."""
    engine, device, (request,) = start(stop=1.0)
    finish(engine)
    assert (len(request.progress.output), request.progress.finish_reason) == (1, "stop")
    assert sum(e.startswith("launch step") for e in device.log) <= 1


def test_no_step_is_launched_while_the_end_may_be_on_its_way():
    """All drafts hold: three steps give the twelve tokens after the first, and no fourth goes out in vain."""
    engine, device, (request,) = start(max_tokens=13, keep=1.0)
    finish(engine)
    assert len(request.progress.output) == 13
    assert sum(e.startswith("launch step") for e in device.log) == 3


def kinds(device: Device) -> str:
    """p: a chunk alone, s: a step alone, m: both in one."""
    return "".join(e.split()[1][0] for e in device.log if e.startswith("launch"))


def test_a_long_prompt_goes_along_with_the_steps_of_a_running_request():
    engine, device, (short,) = start(1, max_tokens=40, keep=0.0)
    for _ in range(3):
        engine.step()
    long = engine.make_request(prompts(1, shortest=48)[0], SamplingParams(max_tokens=2))
    engine.prepare([long])
    device.log.clear()
    engine.submit(long)
    tokens = len(short.progress.output)
    while not long.progress.output:
        engine.step()
    assert kinds(device) == "mmm" + "s"
    # The launch before them, and the three that have been read.
    assert len(short.progress.output) == tokens + 4


def test_prompts_fill_the_slots_while_the_first_ones_run():
    """Each launch takes a chunk along; nobody waits for the others."""
    engine, device, requests = start(4, keep=0.0)
    finish(engine)
    assert kinds(device).startswith("pmmm" + "s")
    assert [len(r.progress.output) for r in requests] == [20] * 4


def test_what_an_aborted_request_left_on_its_way_is_not_measured():
    """It was done long ago when the next request comes: the time between is nobody's."""
    engine, _, (request,) = start(keep=1.0)
    while not request.progress.output:
        engine.step()
    engine.abort(request)
    assert not engine.busy
    before = engine.stats().depth_steps
    other = engine.make_request(prompts(1)[0], SamplingParams(temperature=0, max_tokens=4))
    engine.prepare([other])
    engine.submit(other)
    engine.step()
    assert engine.stats().depth_steps == before
    finish(engine)
    assert len(other.progress.output) == 4
