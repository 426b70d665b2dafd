"""Invariant *no host in the loop*: the host launches the next step before it reads this one.

The device is a stand-in whose state holds nothing: any look at it fails.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.decode.host import Result
from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.buckets import step_key
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, SamplingParams
from tests.engine.device import Device, Late, on_device
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
    assert request.finish_reason == "length"
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
        # At most four prefill chunks and one step go out per call.
        assert launched - read <= 5


def test_the_work_ahead_is_what_was_launched_and_not_read(monkeypatch):
    clock = 0.0
    read = Late.read

    def takes_a_quarter(late: Late) -> Result:
        nonlocal clock
        clock += 0.25
        return read(late)

    monkeypatch.setattr(Late, "read", takes_a_quarter)
    monkeypatch.setattr("time.perf_counter", lambda: clock)
    engine, _, (request,) = start(keep=0.0)
    assert engine.planner.work_ahead(engine._inflight) == 0
    ahead = []
    while len(request.output) < 10:
        engine.step()
        ahead.append(engine.planner.work_ahead(engine._inflight))
    # Nothing is expected of a program before it has run twice: its first run may take far longer.
    assert ahead == sorted(ahead)
    assert ahead[0] == 0.0
    assert ahead[-3:] == [0.25] * 3
    clock += 0.15
    assert engine.planner.work_ahead(engine._inflight) == pytest.approx(0.1)
    finish(engine)
    assert engine.planner.work_ahead(engine._inflight) == 0


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_no_step_is_launched_that_cannot_emit(tokens):
    """Every step emits a token at least, so a row that accepts nothing takes exactly max_tokens - 1 steps."""
    engine, device, (request,) = start(max_tokens=tokens, keep=0.0)
    finish(engine)
    assert len(request.output) == tokens
    assert sum(e.startswith("launch step") for e in device.log) == tokens - 1


def test_a_first_token_is_read_while_the_step_behind_it_runs():
    engine, device, (request,) = start()

    def seen() -> list[str]:
        return [e.rpartition(" ")[0] for e in device.log]

    engine.step()
    assert seen() == ["launch prefill", "launch step"]
    assert engine.step() == [request]
    assert len(request.output) == 1
    engine.step()
    assert seen()[2:] == ["read prefill", "launch step", "read step"]


def test_a_stop_costs_a_step_in_vain_at_most():
    """The step after the first token goes out before that is read."""
    engine, device, (request,) = start(stop=1.0)
    finish(engine)
    assert (len(request.output), request.finish_reason) == (1, "stop")
    assert sum(e.startswith("launch step") for e in device.log) <= 1


def test_no_step_is_launched_while_the_end_may_be_on_its_way():
    """All drafts hold: three steps give the twelve tokens after the first, and no fourth goes out in vain."""
    engine, device, (request,) = start(max_tokens=13, keep=1.0)
    finish(engine)
    assert len(request.output) == 13
    assert sum(e.startswith("launch step") for e in device.log) == 3


def test_steps_wait_for_no_prefill():
    """A long prompt is prefilled chunk by chunk between the steps of a running request."""
    engine, device, _ = start(1, max_tokens=40)
    for _ in range(3):
        engine.step()
    long = engine.make_request(prompts(1, shortest=48)[0], SamplingParams(max_tokens=2))
    engine.prepare([long])
    engine.submit(long)
    finish(engine)
    kinds = "".join(e.split()[1][0] for e in device.log if e.startswith("launch"))
    assert kinds.startswith("pss" + "pspsps")


@pytest.mark.parametrize(("apart", "prefills"), [(2, 1), (12, 2)])
def test_prompts_behind_rows_that_end_close_together_are_prefilled_together(apart, prefills):
    engine, device = on_device(keep=0.0, prefill_chunk=64)
    params = [replace(PARAMS, max_tokens=n) for n in (20, 20 + apart, 40, 40, 8, 8)]
    requests = [engine.make_request(p[:4], q) for p, q in zip(prompts(6), params, strict=True)]
    engine.prepare(requests)
    device.log.clear()
    for r in requests:
        engine.submit(r)
    finish(engine)
    assert [len(r.output) for r in requests] == [q.max_tokens for q in params]
    assert sum(e.startswith("launch prefill") for e in device.log) == 1 + prefills


def test_a_prompt_that_has_begun_waits_for_no_end():
    engine, device = on_device(keep=0.0, max_model_len=128)
    rows = [
        engine.make_request(p[:4], replace(PARAMS, max_tokens=n))
        for p, n in zip(prompts(3), (16, 18, 20), strict=True)
    ]
    long = engine.make_request(prompts(1, shortest=80)[0], PARAMS)
    engine.prepare([*rows, long])
    device.log.clear()
    for r in rows:
        engine.submit(r)
    while len(rows[0].output) < 9:
        engine.step()
    engine.submit(long)
    finish(engine)
    kinds = "".join(e.split()[1][0] for e in device.log if e.startswith("launch"))
    assert "pspspspsps" in kinds, "a step between two chunks, though rows end meanwhile"


def test_what_an_aborted_request_left_on_its_way_is_not_measured():
    """It was done long ago when the next request comes: the time between is nobody's."""
    engine, _, (request,) = start(keep=1.0)
    while not request.output:
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
    assert len(other.output) == 4


def test_pages_are_there_for_the_step_that_runs(monkeypatch):
    """Once pages have changed hands, the program that covers what is wanted may be a deeper one."""
    engine, device, (request,) = start()
    cover, grow, grown, run = device.cover, engine.scheduler.grow, [], []

    def deepest(need):
        return cover(replace(need, depth=3) if isinstance(need, StepKey) else need)

    def record(running, depth):
        grown.append(depth)
        return grow(running, depth) or depth == 1

    def choose(running):
        return step_key(engine.config, running, 1)

    run_step = device.step
    monkeypatch.setattr(device, "step", lambda key, masks: run.append(key.depth) or run_step(key, masks))
    monkeypatch.setattr(engine.planner, "_choose", choose)
    monkeypatch.setattr(device, "cover", deepest)
    monkeypatch.setattr(engine.scheduler, "grow", record)
    finish(engine)
    assert request.finish_reason == "length"
    assert set(run) == {3}
    assert grown == [1, 3] * len(run)
