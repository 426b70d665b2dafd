"""Arrival of tokens: throughput, and the latencies that a user notices, with percentiles."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass
class Timeline:
    """The times of a request and of its tokens, with their numbers, in seconds of ``perf_counter``."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, at: float, tokens: int) -> None:
        """Record ``tokens`` tokens that came together."""
        if tokens:
            self.arrivals.append((at, tokens))

    @property
    def tokens(self) -> int:
        """Number of tokens that came."""
        return sum(n for _, n in self.arrivals)

    @property
    def first(self) -> float:
        """Seconds to the first token: TTFT."""
        return self.arrivals[0][0] - self.sent

    @property
    def end(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1][0] - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first: TPOT; None with fewer than two tokens."""
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    def gaps(self) -> list[float]:
        """Seconds between tokens: tokens that come together share the time since the token before them."""
        return [(b - a) / n for (a, _), (b, n) in pairwise(self.arrivals) for _ in range(n)]


@dataclass(frozen=True)
class Percentiles:
    """Median and percentiles of at least one value, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """The percentiles of values; all 0 if there are no values."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, len(values))


@dataclass(frozen=True)
class LatencySummary:
    """Many requests over ``seconds``.

    Attributes:
        requests: number of requests that got a token.
        tokens: number of generated tokens.
        seconds: seconds from the first request to the last token.
        ttft: time to first token.
        tpot: time per output token after the first, one value per request.
        itl: time between tokens, one value per token; tokens of one step share its time.
        e2e: time to the last token.
    """

    requests: int
    tokens: int
    seconds: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, timelines: Sequence[Timeline], seconds: float) -> "LatencySummary":
        """The summary of timelines; requests without a token are left out."""
        came = [t for t in timelines if t.arrivals]
        return cls(
            len(came),
            sum(t.tokens for t in came),
            seconds,
            Percentiles.of([t.first for t in came]),
            Percentiles.of([p for t in came if (p := t.per_token) is not None]),
            Percentiles.of([g for t in came for g in t.gaps()]),
            Percentiles.of([t.end for t in came]),
        )


def row(rounds: Sequence[LatencySummary]) -> tuple[str, ...]:
    """Cells of a table with ``HEADERS``: medians over the rounds, of the rate and of every percentile."""
    times = (("ttft", 1), ("tpot", 2), ("itl", 2), ("e2e", 0))
    cells = (
        " / ".join(f"{median_of(rounds, name, at) * 1e3:.{digits}f}" for at in ("p50", "p90", "p99"))
        for name, digits in times
    )
    return (f"{statistics.median(s.rate for s in rounds):.1f}", *cells)


def median_of(rounds: Sequence[LatencySummary], latency: str, at: str) -> float:
    """The median over rounds of a percentile of a latency, in seconds."""
    return statistics.median(getattr(getattr(s, latency), at) for s in rounds)


HEADERS = ("tokens/s", "TTFT, ms", "TPOT, ms", "between tokens, ms", "end to end, ms")
PERCENTILES_NOTE = (
    "Medians of the rounds; latencies: p50 / p90 / p99. Tokens that come together share the time since those "
    "before."
)


def acceptance_per_position(drafts: int, accepted: Sequence[int]) -> list[float]:
    """Per position the share of ``drafts`` verified windows in which all drafts up to it were accepted."""
    return [n / drafts for n in accepted] if drafts else []
