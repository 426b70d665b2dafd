"""Host time per step that the device does not hide, with every slot busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.bench.report import Report, Spread
from mtp_jax.bench.subject import Subject, prompts_for
from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.buckets import step_key
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import SamplingParams
from mtp_jax.errors import ConfigError

# Prompt and output stay within the smallest page bucket, so that one executable serves all steps.
_PROMPT, _MAX_LEN = 16, 248


@dataclass(frozen=True)
class Round:
    """Seconds per step: through the engine; of the executable alone; processor time of the host's thread."""

    engine: float
    device: float
    host: float


def measure(engine: Engine, prompts: list[list[int]], steps: int, device_first: bool) -> Round:
    """``steps`` steps of a full batch through ``Engine.step``, and the same steps launched back to back.

    Both begin with the same state, so the device does the same work. The engine is idle afterwards.
    """
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    requests = [engine.make_request(p, params) for p in prompts]
    engine.prepare(requests)
    for request in requests:
        engine.submit(request)
    while len(engine.scheduler.running()) < len(requests) or not all(r.output for r in requests):
        engine.step()
    key = engine.executables.cover(
        step_key(engine.config, engine.scheduler.running(), engine.config.num_speculative_tokens)
    )
    assert isinstance(key, StepKey)
    state = jax.block_until_ready(jax.tree.map(jnp.copy, engine.flushed()))

    def alone() -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(steps):
            state, _ = engine.executables.step(key, engine.params, state)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / steps

    def through_engine() -> tuple[float, float]:
        began, busy = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            engine.step()
        busy = time.thread_time() - busy
        jax.block_until_ready(engine.state)
        return (time.perf_counter() - began) / steps, busy / steps

    order: list[Callable[[], Any]] = [alone, through_engine] if device_first else [through_engine, alone]
    done = {f: f() for f in order}
    if any(r.finished for r in requests):
        raise ConfigError(f"{steps} steps finish a request within {_MAX_LEN} tokens; ask for fewer steps")
    for request in requests:
        engine.abort(request)
    while engine.busy:
        engine.step()
    wall, busy = done[through_engine]
    return Round(wall, done[alone], busy)


def run(subject: Subject, batch: int, depth: int, steps: int, rounds: int) -> Report:
    """Alternate which of the two goes first; report medians over the rounds."""
    given = prompts_for(subject, batch, _PROMPT)
    engine = subject.engine(depth, batch, _MAX_LEN)
    measure(engine, given.ids, steps, False)
    results = [measure(engine, given.ids, steps, i % 2 == 1) for i in range(rounds)]
    wall, device, host = (Spread.of([getattr(r, f) for r in results]) for f in ("engine", "device", "host"))
    exposed = Spread.of([(r.engine - r.device) / r.engine for r in results])
    rows = [
        ("a step through the engine", wall.show(3, 1e3)),
        ("the executable alone", device.show(3, 1e3)),
        ("the host thread's processor time", host.show(3, 1e3)),
    ]
    notes = [
        f"Host time not hidden behind the device: {exposed.show(1, 100)} % of a step.",
        f"batch {batch}, depth {depth}, {rounds} alternating rounds of {steps} steps; {given.source}.",
    ]
    figures = {
        "engine_seconds": wall,
        "device_seconds": device,
        "host_thread_seconds": host,
        "exposed_fraction": exposed,
        "rounds": [vars(r) for r in results],
    }
    return Report(f"Host time per step: {subject.name}", ("per step", "ms (quartiles)"), rows, notes, figures)
