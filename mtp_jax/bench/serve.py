"""Throughput and latency of a server over HTTP: a closed loop, or arrivals at a rate."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import httpx2
import numpy as np

from mtp_jax.bench import client, corpus
from mtp_jax.bench.client import Answer, Speculated, Target
from mtp_jax.bench.latency import HEADERS, Summary, acceptance_per_position
from mtp_jax.bench.report import Report, Spread
from mtp_jax.errors import ConfigError, MtpJaxError

# What a request says to be served without drafts; servers other than this project's may refuse it.
_OFF = {"speculative": {"enabled": False}}


@dataclass(frozen=True)
class Load:
    """What the server is given.

    Attributes:
        concurrency: requests at a time, for closed loops; empty if there are rates.
        rates: requests per second, for Poisson arrivals.
        requests: per run; None: four per concurrent one, at least 16, or ten seconds of arrivals.
        prompt_characters: of every prompt.
        rounds: runs at every level, after one that is not measured.
        compare: every round also without speculation.
    """

    concurrency: Sequence[int]
    rates: Sequence[float]
    requests: int | None
    prompt_characters: int
    rounds: int
    compare: bool


@dataclass(frozen=True)
class Run:
    """One run: latencies, errors by message, what the server counted."""

    summary: Summary
    errors: Counter[str]
    speculated: Speculated | None


def run(target: Target, api_key: str | None, load: Load) -> Report:
    """Measure every level. Raises ConfigError, and MtpJaxError if there is no server or nothing works."""
    if bool(load.concurrency) == bool(load.rates):
        raise ConfigError("give either --concurrency or --rate")
    if min([*load.concurrency, *load.rates, load.rounds, load.prompt_characters]) <= 0:
        raise ConfigError("concurrency, rate, rounds and prompt characters must be above 0")
    if load.requests and load.requests < (most := max(load.concurrency, default=0)):
        raise ConfigError(f"--requests {load.requests} is fewer than the {most} at a time of --concurrency")
    return asyncio.run(_run(target, api_key, load))


async def _run(target: Target, api_key: str | None, load: Load) -> Report:
    modes = ["off", "server"] if load.compare else ["server"]
    rows: list[tuple[Any, ...]] = []
    figures: list[dict[str, Any]] = []
    async with client.connect(target.base_url, api_key) as http:
        target = replace(target, model=target.model or await client.model_name(http))
        flushed = await client.flush(http)
        for level in load.concurrency or load.rates:
            runs: dict[str, list[Run]] = {m: [] for m in modes}
            prompts = texts(_requests(load, level), load.prompt_characters)
            for i in range(load.rounds + 1):
                for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
                    await client.flush(http)
                    done = await _measure(http, target, prompts, load, level, mode)
                    runs[mode] += [done] if i else []
            for mode in modes:
                found = _figures(load, level, mode, runs[mode], runs[modes[0]])
                figures.append(found)
                median = Summary.median([r.summary for r in runs[mode]])
                errors = sum(sum(r.errors.values()) for r in runs[mode])
                length = f"{found['acceptance_length']:.2f}" if found["acceptance_length"] else "-"
                rows.append((level, mode, found["speedup"].show(), length, errors, *median.row()))
    what = "requests at a time" if load.concurrency else "requests per second"
    headers = (what, "MTP", f"over {modes[0]}", "acceptance length", "errors", *HEADERS)
    kind = "Closed loop" if load.concurrency else "Poisson arrivals"
    count = load.requests or "as many as it takes"
    note = (
        f"{kind}, {load.rounds} rounds per level of {count} prompts of {load.prompt_characters} characters, "
        f"{target.max_tokens} tokens each, temperature {target.temperature:g}; prefixes "
        f"{'' if flushed else 'NOT '}forgotten before every run. Latencies: p50 / p90 / p99; a chunk may "
        "bring several tokens, and between them is the time between chunks. Acceptance length: 1 and the "
        "drafts accepted per window that had any, by the server's counters."
    )
    if load.compare:
        over = "throughput" if load.concurrency else "p50 of the end-to-end latency, off's over its own,"
        note += f" Over off: {over} in the same round, median and quartiles."
    return Report(f"Server: {target.base_url}, {target.model}", headers, rows, [note], {"levels": figures})


def _requests(load: Load, level: float) -> int:
    if load.requests:
        return load.requests
    return max(16, int(4 * level if load.concurrency else 10 * level))


async def _measure(
    http: httpx2.AsyncClient, target: Target, prompts: Sequence[str], load: Load, level: float, mode: str
) -> Run:
    extra = _OFF if mode == "off" else {}

    async def ask(prompt: str) -> Answer:
        return await client.ask(http, target, prompt, extra)

    before, began = await client.speculated(http), time.perf_counter()
    if load.concurrency:
        answers = await client.closed_loop(ask, prompts, int(level))
    else:
        answers = await client.poisson(ask, prompts, level)
    seconds = time.perf_counter() - began
    after = await client.speculated(http)
    good = [a for a in answers if a.error is None]
    errors = Counter(a.error for a in answers if a.error is not None)
    if not good:
        raise MtpJaxError(f"no request was answered: {errors.most_common(1)[0][0]}")
    counted = after.since(before) if after is not None and before is not None else None
    return Run(Summary.of([a.timeline for a in good], seconds), errors, counted)


def _figures(load: Load, level: float, mode: str, own: list[Run], first: list[Run]) -> dict[str, Any]:
    counted = [r.speculated for r in own if r.speculated is not None]
    drafts = sum(c.drafts for c in counted)
    accepted = [sum(at) for at in zip_longest(*(c.accepted for c in counted), fillvalue=0)]
    return {
        "concurrency" if load.concurrency else "rate": level,
        "mode": mode,
        "speedup": Spread.of([_faster(load, a, b) for a, b in zip(own, first, strict=True)]),
        "tokens_per_second": Spread.of([r.summary.rate for r in own]),
        "acceptance_length": 1 + sum(accepted) / drafts if drafts else None,
        "acceptance_per_position": acceptance_per_position(drafts, accepted),
        "errors": dict(sum((r.errors for r in own), Counter())),
        "rounds": [r.summary for r in own],
    }


def _faster(load: Load, run: Run, than: Run) -> float:
    """How many times. At a rate throughput is what arrives, however fast it is answered."""
    if load.concurrency:
        return run.summary.rate / than.summary.rate
    return than.summary.e2e.p50 / run.summary.e2e.p50


def texts(count: int, characters: int) -> list[str]:
    """Prompts from the standard library's source that the embedded model was not trained on; seed 0."""
    files = [f.text for f in corpus.split(corpus.read_files()).held_out if len(f.text) > characters]
    if not files:
        raise ConfigError(f"no file of the standard library has {characters} characters; ask for fewer")
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(files), size=count)
    starts = [int(rng.integers(len(files[i]) - characters)) for i in chosen]
    return [files[i][at : at + characters] for i, at in zip(chosen, starts, strict=True)]
