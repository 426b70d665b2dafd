"""An open loop against a running server: a request is sent at its time, even while earlier requests wait."""

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
from mtp_jax.lab.bench.report import Report, forced
from mtp_jax.lab.bench.traffic import Arrivals, Traffic, TrafficPrompt, schedule

KEY = "OPENAI_API_KEY"
_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class ServerLoad:
    """Load on a server.

    Attributes:
        rates: requests per second; each is a level, one after the other. inf: all at once. requests: number
        of requests of each level.
        arrivals: spacing of requests, "poisson" or "fixed".
        seed: seed of arrivals and of the order of prompts.
        seconds: seconds without new data after which a request has failed.
    """

    rates: Sequence[float]
    requests: int
    arrivals: Arrivals
    seed: int
    seconds: float


def run(
    url: str, api: Api, model: str | None, fields: JsonMapping, prompts: Traffic, load: ServerLoad
) -> Iterator[Report]:
    """Measure level by level; yields the report so far after each.

    fields: fields of every request. The environment's OPENAI_API_KEY is the server's key. Raises ConfigError
    for an address that is none, MtpJaxError if no server answers, or no request of a level is answered.
    """
    given = prompts.take(load.requests * len(load.rates), load.seed)
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    # The environment's proxy is not used, as it would be measured, too.
    http = httpx2.AsyncClient(
        base_url=address(url), headers=headers, timeout=load.seconds, limits=limits, trust_env=False
    )
    levels: list[RateLevel] = []
    with asyncio.Runner() as runner:
        try:
            endpoint = runner.run(connect(http, api, model, fields, given[0]))
            for i, rate in enumerate(load.rates):
                asked = given[i * load.requests :][: load.requests]
                levels.append(runner.run(_level(endpoint, rate, asked, load)))
                yield _report(url, endpoint, prompts, load, levels)
        finally:
            runner.run(http.aclose())


@dataclass(frozen=True)
class RateLevel:
    """Results of one rate."""

    rate: float
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
        return (f"{self.rate:g}", done, self.answered, failed, length, *row([self.summary]))

    @property
    def figures(self) -> JsonObject:
        """All results, for JSON."""
        seconds, prompt_tokens = self.summary.seconds, sum(a.prompt_tokens for a in self.answers)
        return {
            "rate": self.rate if math.isfinite(self.rate) else "inf",  # JSON has no infinity
            "answered": self.answered,
            "answered_per_second": self.answered / seconds,
            "counts": self.counts,
            "output_tokens_per_second": self.summary.rate,
            "prompt_tokens_per_second": prompt_tokens / seconds,
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


async def _level(
    endpoint: Endpoint, rate: float, prompts: Sequence[TrafficPrompt], load: ServerLoad
) -> RateLevel:
    """Measure one rate; only complete answers count. Raises MtpJaxError if there is none."""
    before = await drafted(endpoint.http)
    start = time.perf_counter()
    due = [start + after for after in schedule(len(prompts), rate, load.arrivals, load.seed)]

    async def one(prompt: TrafficPrompt, at: float) -> Answered:
        await sleep_until(at)
        return await endpoint.ask(prompt, at)

    answers = await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, due, strict=True)))
    after = await drafted(endpoint.http)
    whole = [a.timeline for a in answers if not a.failure]
    seconds = max((t.sent + t.end - start for t in whole if t.arrivals), default=0.0)
    drafts = after.since(before) if before and after else None
    level = RateLevel(rate, LatencySummary.of(whole, seconds), answers, drafts)
    if not level.summary.requests:
        reasons = "; ".join(f"{n} x {why}" for why, n in level.failures.most_common(_SHOWN_FAILURES))
        raise MtpJaxError(f"no request at {rate:g} per second was answered: {reasons or 'without a token'}")
    return level


def _report(
    url: str,
    endpoint: Endpoint,
    prompts: Traffic,
    load: ServerLoad,
    levels: Sequence[RateLevel],
) -> Report:
    counted = {
        "chunks": "Tokens are the server's count in every chunk.",
        "answers": "The server counts the tokens of an answer alone: they are spread evenly over its chunks.",
        "none": "The server counts no tokens: each chunk is one, and several may have come in it.",
    }[_least([level.counts for level in levels])]
    failures = sum((level.failures for level in levels), Counter[str]())
    notes = [
        f"Open loop, {load.requests} requests per rate, {load.arrivals} arrivals, seed {load.seed}; "
        f"{prompts.source}; {endpoint.api} of {endpoint.fields['model']}.",
        "Latencies: p50 / p90 / p99 of whole answers; TTFT and end to end since a request was due. "
        "Acceptance length: of all steps in which the server verified drafts meanwhile, by its /metrics; "
        f"-: it tells of none. {counted}",
        *(f"FAILED, {n} times: {why}" for why, n in failures.most_common(_SHOWN_FAILURES)),
    ]
    headers = ("requests/s", "answered/s", "answered", "failed", "acceptance length", *HEADERS)
    rows, figures = [level.row for level in levels], [level.figures for level in levels]
    found = {"model": endpoint.fields["model"], "levels": figures}
    report = Report(f"Served load: {url}", headers, rows, notes, found, len(load.rates) - len(levels))
    lengths = {level.drafts.forced for level in levels if level.drafts and level.drafts.forced}
    return forced(report, f"{MARK} acceptance: length {max(lengths):.4g}") if lengths else report
