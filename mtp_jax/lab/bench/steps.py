"""Whole decode steps without a prompt: their time, and the launches that it goes to.

A step is the engine's own program, launched as the engine does: before the last one's result is read. Slots
are declared to hold rows that no model computed. A few more steps are traced.
"""

import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp

from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.launches import StepLaunch
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.decode.state import Slots, State
from mtp_jax.lab.bench.trace import Trace, read
from mtp_jax.spread import Spread

# Steps before the first that counts: the host is a launch ahead, and clocks rise. Steps that are traced.
SETTLE, TRACED = 8, 4
ATTENTION = "mla_decode"
"""The beginning of the name of the kernel with which a layer begins."""
_WINDOW = "traced steps"

TimedLaunches = Sequence[tuple[str, float]]
"""Launches in order: a kernel, and its seconds."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one program.

    Attributes:
        seconds: the time of a step.
        call: seconds that the host takes to launch one.
        tokens: number of tokens per step and slot.
        launches: the launches of ``TRACED`` steps.
    """

    seconds: Spread
    call: Spread
    tokens: float
    launches: TimedLaunches


def growth(depth: int, steps: int) -> int:
    """The most tokens that a slot gains while ``steps`` steps are measured."""
    return (depth + 1) * (1 + SETTLE + steps + TRACED)


def measure(runner: LocalRunner, key: StepKey, rows: int, steps: int) -> MeasuredSteps:
    """Compile a program and time its steps; every slot is in the midst of a request, with ``rows`` rows.

    The pages of the cache, and the model's positions, must have room for ``rows`` and ``growth``.
    """
    runner.compile([key])
    declare(runner, key.depth, rows)
    counts, calls, times = [], [], []
    pending = runner.do(StepLaunch(key))
    for _ in range(SETTLE + steps):
        began = time.perf_counter()
        following = runner.do(StepLaunch(key))
        calls.append(time.perf_counter() - began)
        counts.append(pending.read().packed[:, key.depth + 1].mean())
        times.append(time.perf_counter() - began)
        pending = following
    pending.read()
    tokens = statistics.fmean(map(float, counts[SETTLE:]))
    found = launches(_traced(runner, key))
    return MeasuredSteps(Spread.of(times[SETTLE:]), Spread.of(calls[SETTLE:]), tokens, found)


def declare(runner: LocalRunner, depth: int, rows: int) -> None:
    """Let every slot be in the midst of a greedy request, with ``rows`` random rows behind it."""

    def full(array: jax.Array, value: float) -> jax.Array:
        return jnp.full(array.shape, value, array.dtype)

    def random(state: State) -> State:
        def of(a: jax.Array) -> jax.Array:
            floating = jnp.issubdtype(a.dtype, jnp.floating)
            return jax.random.normal(jax.random.key(1), a.shape, a.dtype) if floating else a

        return state.replace(trunk=jax.tree.map(of, state.trunk))

    state = jax.jit(random, donate_argnums=0)(runner.state)
    s: Slots = state.slots
    plain = replace(s.sampling, top_p=full(s.sampling.top_p, 1), repetition=full(s.sampling.repetition, 1))
    slots = s.replace(
        length=full(s.length, rows),
        active=full(s.active, True),
        remaining=full(s.remaining, 2**20),
        depth=full(s.depth, depth),
        page_table=jnp.arange(s.page_table.size, dtype=jnp.int32).reshape(s.page_table.shape),
        sampling=plain,
    )
    runner.state = state.replace(slots=slots)


def _traced(runner: LocalRunner, key: StepKey) -> Trace:
    """A trace of ``TRACED`` steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options), jax.profiler.TraceAnnotation(_WINDOW):
            for _ in range(TRACED):
                runner.do(StepLaunch(key)).read()
        (recorded,) = Path(folder).rglob("*.xplane.pb")
        return read(recorded, _WINDOW)


def launches(trace: Trace) -> TimedLaunches:
    """Every launch in order: its kernel, without XLA's number, and its seconds."""
    ops = sorted((op for line in trace.lines for op in line), key=lambda op: op.start)
    return [(re.sub(r"[._]\d+$", "", op.kernel), (op.end - op.start) / 1e9) for op in ops]


def kernels(found: TimedLaunches) -> list[tuple[str, int, float]]:
    """(kernel, launches, seconds) of each kernel, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, seconds in found:
        spent[name].append(seconds)
    return sorted(((n, len(s), sum(s)) for n, s in spent.items()), key=lambda row: -row[2])


def layer(found: TimedLaunches) -> TimedLaunches:
    """(kernel, median seconds) of each launch from one layer's attention to the next, in the commonest order.

    Empty where no kernel of ours computes attention.
    """
    begins = [i for i, (name, _) in enumerate(found) if name.startswith(ATTENTION)]
    parts = [found[a:b] for a, b in pairwise(begins)]
    orders = Counter(tuple(name for name, _ in part) for part in parts)
    if not orders:
        return []
    (order, _), *_ = orders.most_common(1)
    alike = [part for part in parts if tuple(name for name, _ in part) == order]
    return [(name, statistics.median(p[i][1] for p in alike)) for i, name in enumerate(order)]
