"""Throughput and latency of the Python engine in a closed loop: without MTP, with it, and adaptive."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mtp_jax.api.session import Session
from mtp_jax.decode.law import Acceptance, Law
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench.latency import (
    HEADERS,
    PERCENTILES_NOTE,
    LatencySummary,
    Timeline,
    acceptance_per_position,
    row,
)
from mtp_jax.lab.bench.report import Report, forced
from mtp_jax.lab.bench.subject import Subject, prompts_for
from mtp_jax.spread import Spread

# "control" equals "off": its speed-up is the difference that the machine makes between equal engines.
Mode = Literal["off", "control", "fixed", "adaptive"]
MODES: tuple[Mode, ...] = get_args(Mode)
_DRAFTING: tuple[Mode, ...] = "fixed", "adaptive"


@dataclass(frozen=True)
class SweepLoad:
    """The load of every mode.

    Attributes:
        concurrency: requests at a time; each level is measured.
        depth: number of drafts per step of "fixed", and most drafts of "adaptive".
        requests: number per run; None: four times the concurrency, at least 16.
        prompt_tokens, max_tokens: number of tokens of every request.
        temperature: 0 is greedy.
        rounds: number of measured runs of every mode at every level; a run before them is not measured.
    """

    concurrency: Sequence[int]
    depth: int
    requests: int | None
    prompt_tokens: int
    max_tokens: int
    temperature: float
    rounds: int

    def requests_at(self, level: int) -> int:
        """Number of requests of a run."""
        return self.requests or max(4 * level, 16)


@dataclass(frozen=True)
class ModeRun:
    """One run of one mode: latencies, counts of drafts, and the tokens."""

    summary: LatencySummary
    speculation: Speculation
    texts: list[list[int]]


def closed_loop(
    engine: Engine, prompts: Sequence[Sequence[int]], load: SweepLoad, concurrency: int
) -> ModeRun:
    """Complete every prompt, ``concurrency`` at a time: a new request begins when one ends."""
    params = [
        SamplingParams(temperature=load.temperature, max_tokens=load.max_tokens, ignore_eos=True)
        for _ in prompts
    ]
    waiting = [
        engine.make_request(p, s, seed=i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    engine.prepare(waiting[:concurrency], every_size=True)
    requests, lines = list(waiting), {r.id: Timeline(0.0) for r in waiting}
    seen = dict.fromkeys(lines, 0)

    def submit() -> None:
        request = waiting.pop(0)
        lines[request.id].sent = time.perf_counter()
        engine.submit(request)

    began = time.perf_counter()
    for _ in range(min(concurrency, len(waiting))):
        submit()
    for advanced in Session(engine).run():
        now = time.perf_counter()
        for request in advanced:
            lines[request.id].add(now, len(request.progress.output) - seen[request.id])
            seen[request.id] = len(request.progress.output)
            if request.finished and waiting:
                submit()
    return ModeRun(
        LatencySummary.of(list(lines.values()), time.perf_counter() - began),
        sum((r.progress.speculation for r in requests), Speculation()),
        [r.progress.output for r in requests],
    )


def run(
    subject: Subject, modes: Sequence[Mode], load: SweepLoad, synthetic_acceptance: Acceptance | None = None
) -> Iterator[Report]:
    """Measure all modes at every level, alternating; "off" is always among them, as the baseline.

    synthetic_acceptance: of modes that draft, as the option of ``LLM``. Yields the report so far after every
    level. Raises ConfigError for loads that cannot be measured.
    """
    used: list[Mode] = [m for m in MODES if m == "off" or m in modes]
    _check(load)
    most = max(load.concurrency)
    given = prompts_for(subject, max(map(load.requests_at, load.concurrency)), load.prompt_tokens)
    length = load.prompt_tokens + load.max_tokens + load.depth  # a step has equally many pages in every mode
    law = None if synthetic_acceptance is None else Law.of(synthetic_acceptance, load.depth)
    engines: dict[Mode, Engine] = {
        m: subject.engine(load.depth * (m in _DRAFTING), most, length, m == "adaptive", synthetic_acceptance)
        for m in used
    }
    note = _about(load, given.source, "control" in used)
    headers = ("at a time", "MTP", "speed-up", "acceptance length", "same tokens", *HEADERS)
    title = f"Load: {subject.name}"
    rows: list[tuple[Any, ...]] = []
    figures: list[JsonObject] = []
    exact = load.temperature == 0 and law is None
    for pending, level in zip(reversed(range(len(load.concurrency))), load.concurrency, strict=True):
        runs = _rounds(engines, given.ids[: load.requests_at(level)], load, level)
        for mode in used:
            found = _figures(level, mode, runs, exact)
            figures.append(found)
            length_of = f"{found['acceptance_length']:.2f}"
            same = {None: "-", True: "yes", False: "NO"}[found["same_tokens"]]
            cells = row([r.summary for r in runs[mode]])
            rows.append((level, mode, found["speedup"].show(), length_of, same, *cells))
        report = Report(title, headers, [*rows], [note, PERCENTILES_NOTE], {"levels": [*figures]}, pending)
        yield subject.marked(report if law is None else forced(report, str(law)))


def _check(load: SweepLoad) -> None:
    """Raise ConfigError for a load that cannot be measured."""
    most = max(load.concurrency, default=0)
    if min(load.concurrency, default=0) < 1 or load.rounds < 1 or load.max_tokens < 2 or load.depth < 1:
        raise ConfigError("concurrency, rounds and depth are 1 or more, max_tokens 2 or more")
    if load.requests and load.requests < most:
        raise ConfigError(f"--requests {load.requests} is fewer than the {most} at a time of --concurrency")


def _about(load: SweepLoad, source: str, control: bool) -> str:
    """The note below the table. source: of the prompts, in words."""
    count = load.requests or "max(16, 4 x level)"
    note = (
        f"Closed loop, {load.rounds} alternating rounds per level of {count} prompts of {load.prompt_tokens} "
        f"tokens ({source}), {load.max_tokens} tokens each, temperature {load.temperature:g}, depth "
        f"{load.depth} (adaptive: at most). Speed-up: throughput over that of the same round at depth 0, "
        'without the NextN layers ("off"), median and quartiles. Acceptance length: tokens per step of a row.'
    )
    return note + ' "control": a second engine like "off"; a speed-up other than 1 is noise.' * control


def _rounds(
    engines: Mapping[Mode, Engine], prompts: Sequence[Sequence[int]], load: SweepLoad, level: int
) -> dict[Mode, list[ModeRun]]:
    """Runs of every mode at one level, in turns that begin with another mode each; the first is dropped."""
    modes: list[Mode] = [*engines]
    runs: dict[Mode, list[ModeRun]] = {m: [] for m in modes}
    for i in range(load.rounds + 1):
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            runs[mode].append(closed_loop(engines[mode], prompts, load, level))
    return {mode: done[1:] for mode, done in runs.items()}


def _figures(level: int, mode: Mode, runs: Mapping[Mode, list[ModeRun]], exact: bool) -> JsonObject:
    """exact: whether the tokens of all modes must be the same."""
    own, plain = runs[mode], runs["off"]
    spec = sum((r.speculation for r in own), Speculation())
    drafts = sum(n > 0 for n in spec.drafted_per_step)
    ratios = [a.summary.rate / b.summary.rate for a, b in zip(own, plain, strict=True)]
    return {
        "concurrency": level,
        "mode": mode,
        "speedup": Spread.of(ratios),
        "tokens_per_second": Spread.of([r.summary.rate for r in own]),
        "same_tokens": all(a.texts == b.texts for a, b in zip(own, plain, strict=True)) if exact else None,
        "depth_steps": {d: spec.drafted_per_step.count(d) for d in sorted(set(spec.drafted_per_step))},
        "acceptance_length": spec.acceptance_length,
        "acceptance_per_position": acceptance_per_position(drafts, spec.accepted_per_position),
        "rounds": [r.summary for r in own],
    }
