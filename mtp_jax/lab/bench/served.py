"""Load on a running server, from outside: an open loop, or a closed one.

In an open loop a request is sent at its time, even while earlier requests wait, so that a queue shows. In a
closed loop each client sends its next request when its last one is answered, so that the server's most shows.
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import httpx2

from mtp_jax.decode.law import MARK
from mtp_jax.errors import MtpJaxError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.lab.bench.endpoint import (
    Answered,
    Api,
    Counting,
    DraftCounts,
    Endpoint,
    address,
    connect,
    drafted,
    sleep_until,
)
from mtp_jax.lab.bench.latency import HEADERS, LatencySummary, acceptance_per_position, row
from mtp_jax.lab.bench.report import Report, forced, marked
from mtp_jax.lab.bench.traffic import Arrivals, Traffic, TrafficPrompt, schedule

KEY = "OPENAI_API_KEY"
_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class ServerLoad:
    """Load on a server.

    Attributes:
        levels: requests per second, inf: all at once; in a closed loop, requests at a time. One level is
        measured after the other.
        requests: number of requests of each level.
        arrivals: spacing of requests, "poisson" or "fixed"; None: the loop is closed.
        seed: seed of arrivals and of the order of prompts.
        seconds: seconds without new data after which a request has failed.
    """

    levels: Sequence[float]
    requests: int
    arrivals: Arrivals | None
    seed: int
    seconds: float

    def told(self, level: float) -> str:
        """A level in words."""
        return f"{level:g} requests at a time" if self.arrivals is None else f"{level:g} requests per second"


def run(
    url: str, api: Api, model: str | None, fields: JsonMapping, prompts: Traffic, load: ServerLoad
) -> Iterator[Report]:
    """Measure level by level; yields the report so far after each.

    fields: fields of every request. The environment's OPENAI_API_KEY is the server's key. Raises ConfigError
    for an address that is none, MtpJaxError if no server answers, or no request of a level is answered.
    """
    given = prompts.take(load.requests * len(load.levels), load.seed)
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    # The environment's proxy is not used, as it would be measured, too.
    http = httpx2.AsyncClient(
        base_url=address(url), headers=headers, timeout=load.seconds, limits=limits, trust_env=False
    )
    levels: list[ServedLevel] = []
    with asyncio.Runner() as runner:
        try:
            endpoint = runner.run(connect(http, api, model, fields, given[0]))
            for i, level in enumerate(load.levels):
                asked = given[i * load.requests :][: load.requests]
                levels.append(runner.run(_measured(endpoint, level, asked, load)))
                yield _report(url, endpoint, prompts, load, levels)
        finally:
            runner.run(http.aclose())


@dataclass(frozen=True)
class ServedLevel:
    """Results of one level."""

    level: float
    summary: LatencySummary
    answers: Sequence[Answered]
    drafts: DraftCounts | None

    @property
    def failures(self) -> Counter[str]:
        """Number of failures, by reason."""
        return Counter(answer.failure for answer in self.answers if answer.failure)

    @property
    def answered(self) -> int:
        """The complete answers."""
        return len(self.answers) - self.failures.total()

    @property
    def counts(self) -> Counting:
        """The least informative place of counts among complete answers."""
        return _least([a.counts for a in self.answers if not a.failure])

    @property
    def row(self) -> tuple[object, ...]:
        """Cells of the table."""
        failed, length = self.failures.total(), f"{self.drafts.acceptance_length:.2f}" if self.drafts else "-"
        done = f"{self.answered / self.summary.seconds:.2f}"
        return (f"{self.level:g}", done, self.answered, failed, length, *row([self.summary]))

    @property
    def figures(self) -> JsonObject:
        """All results, for JSON."""
        seconds, prompt_tokens = self.summary.seconds, sum(a.prompt_tokens for a in self.answers)
        return {
            "level": self.level if math.isfinite(self.level) else "inf",  # JSON has no infinity
            "answered": self.answered,
            "answered_per_second": self.answered / seconds,
            "counts": self.counts,
            "output_tokens_per_second": self.summary.rate,
            "prompt_tokens_per_second": prompt_tokens / seconds,
            "total_tokens_per_second": self.summary.rate + prompt_tokens / seconds,
            "prompt_tokens": prompt_tokens,
            "failures": dict(self.failures),
            "acceptance_length": self.drafts.acceptance_length if self.drafts else None,
            "acceptance_per_position": acceptance_per_position(self.drafts.rows, self.drafts.positions)
            if self.drafts
            else None,
            "drafts": self.drafts,
            "latencies": self.summary,
        }


def _least(counts: Sequence[Counting]) -> Counting:
    return max(counts, key=get_args(Counting).index)


async def _measured(
    endpoint: Endpoint, level: float, prompts: Sequence[TrafficPrompt], load: ServerLoad
) -> ServedLevel:
    """Measure one level; only complete answers count. Raises MtpJaxError if there is none."""
    before = await drafted(endpoint.http)
    start = time.perf_counter()
    if load.arrivals is None:
        answers = await _closed(endpoint, int(level), prompts)
    else:
        due = [start + after for after in schedule(len(prompts), level, load.arrivals, load.seed)]
        answers = await _open(endpoint, due, prompts)
    after = await drafted(endpoint.http)
    whole = [a.timeline for a in answers if not a.failure]
    seconds = max((t.sent + t.end - start for t in whole if t.arrivals), default=0.0)
    drafts = after.since(before) if before and after else None
    found = ServedLevel(level, LatencySummary.of(whole, seconds), answers, drafts)
    if not found.summary.requests:
        reasons = "; ".join(f"{n} x {why}" for why, n in found.failures.most_common(_SHOWN_FAILURES))
        raise MtpJaxError(f"no request of {load.told(level)} was answered: {reasons or 'without a token'}")
    return found


async def _open(endpoint: Endpoint, due: Sequence[float], prompts: Sequence[TrafficPrompt]) -> list[Answered]:
    """Send each request at its time. due: seconds of ``perf_counter``."""

    async def one(prompt: TrafficPrompt, at: float) -> Answered:
        await sleep_until(at)
        return await endpoint.ask(prompt, at)

    return await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, due, strict=True)))


async def _closed(endpoint: Endpoint, many: int, prompts: Sequence[TrafficPrompt]) -> list[Answered]:
    """Keep ``many`` requests on their way until no prompt is left."""
    left = iter(prompts)

    async def client() -> list[Answered]:
        return [await endpoint.ask(prompt, time.perf_counter()) for prompt in left]

    return [answer for own in await asyncio.gather(*(client() for _ in range(many))) for answer in own]


def _report(
    url: str,
    endpoint: Endpoint,
    prompts: Traffic,
    load: ServerLoad,
    levels: Sequence[ServedLevel],
) -> Report:
    counted = {
        "chunks": "Tokens are the server's count in every chunk.",
        "answers": "The server counts the tokens of an answer alone: they are spread evenly over its chunks.",
        "none": "The server counts no tokens: each chunk is one, and several may have come in it.",
    }[_least([level.counts for level in levels])]
    failures = sum((level.failures for level in levels), Counter[str]())
    loop, since = f"Open loop, {load.requests} requests per rate, {load.arrivals} arrivals", "due"
    if load.arrivals is None:
        loop, since = f"Closed loop, {load.requests} requests per level", "sent"
    notes = [
        f"{loop}, seed {load.seed}; {prompts.source}; {endpoint.api} of {endpoint.fields['model']}.",
        f"Latencies: p50 / p90 / p99 of whole answers; TTFT and end to end since a request was {since}. "
        "Acceptance length: of all steps in which the server verified drafts meanwhile, by its /metrics; "
        f"-: it tells of none. {counted}",
        *(f"FAILED, {n} times: {why}" for why, n in failures.most_common(_SHOWN_FAILURES)),
    ]
    headers = (
        "at a time" if load.arrivals is None else "requests/s",
        "answered/s",
        "answered",
        "failed",
        "acceptance length",
        *HEADERS,
    )
    rows, figures = [level.row for level in levels], [level.figures for level in levels]
    found = {"model": endpoint.fields["model"], "loop": loop, "levels": figures}
    report = Report(f"Served load: {url}", headers, rows, notes, found, len(load.levels) - len(levels))
    lengths = {level.drafts.forced for level in levels if level.drafts and level.drafts.forced}
    if lengths:
        return forced(report, f"{MARK} acceptance: length {max(lengths):.4g}")
    note = f"Every answer of this server is marked {endpoint.mark}: no model's own."
    return marked(report, note, {"mark": endpoint.mark}, endpoint.mark) if endpoint.mark else report
