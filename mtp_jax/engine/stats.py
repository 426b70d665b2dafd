"""Statistics of an engine: totals since its start, and snapshots."""

from bisect import bisect_left
from collections import Counter, defaultdict
from copy import copy
from dataclasses import dataclass, field, fields

from mtp_jax.decode.keys import Origin
from mtp_jax.engine.balance import ExpertStats
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.store.tier import HostTier, TierStats

# vLLM's bounds of the same.
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


@dataclass
class Histogram:
    """A histogram: the number of values in each bucket.

    Attributes:
        bounds: upper ends of all buckets but the last, which has none.
        counts: number of values in each bucket.
        sum: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """A histogram without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float, times: int) -> None:
        """Count a value, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def __copy__(self) -> "Histogram":
        return Histogram(self.bounds, [*self.counts], self.sum)


def _by_source() -> Counter[str]:
    return Counter(dict.fromkeys((source.name.lower() for source in Origin), 0))


@dataclass
class Counters:
    """Running totals. Only the engine changes them.

    Attributes:
        generation_tokens: number of emitted tokens, also tokens that a stop string cut off.
        prefix_queries: number of prompt tokens looked up in the prefix cache.
        hits_by_tier: looked-up tokens that were found, by place: "device", "host" or "file".
        drafted_by_source: drafts verified, by drafter: "nextn", "suffix" or "other".
        accepted_by_source: drafts accepted, by drafter.
        first_drafts: number of (row, step) pairs with verified drafts, by drafter.
        accepted_first_drafts: number of such pairs whose first draft was accepted.
        accepted_per_position: number of accepted drafts at each position.
        inter_token: seconds from token to token of a request; tokens of one step share the time since the
            step before.
        launch_tokens: number of tokens of a launch: of prompts that it read, and of texts.
        depth_steps: steps that advanced requests, by depth.
        step_seconds: seconds of these steps, each from the end of the launch before.
        prefill_seconds: seconds of steps that had prompts alone.
        finished: requests by finish reason.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    hits_by_tier: Counter[str] = field(default_factory=lambda: Counter(device=0, host=0))
    drafted_by_source: Counter[str] = field(default_factory=_by_source)
    accepted_by_source: Counter[str] = field(default_factory=_by_source)
    first_drafts: Counter[str] = field(default_factory=_by_source)
    accepted_first_drafts: Counter[str] = field(default_factory=_by_source)
    accepted_per_position: list[int] = field(default_factory=list)
    inter_token: Histogram = field(default_factory=lambda: Histogram.empty(_GAPS))
    launch_tokens: Histogram = field(default_factory=lambda: Histogram.empty(_STEP_TOKENS))
    depth_steps: Counter[int] = field(default_factory=Counter)
    step_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    prefill_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)

    def looked_up(self, tokens: int, found: int, restored: int, fetched: int) -> None:
        """Count a prompt's tokens: all, ``found`` in the prefix cache, ``restored`` from the host.

        fetched: tokens whose pages came to the host from files just before.
        """
        self.prefix_queries += tokens
        self.hits_by_tier["device"] += found - restored
        if fetched := min(fetched, restored):
            self.hits_by_tier["file"] += fetched
        self.hits_by_tier["host"] += restored - fetched

    def stepped(self, depth: int, seconds: float) -> None:
        """Count one step."""
        self.depth_steps[depth] += 1
        self.step_seconds[depth] += seconds

    def ended_anew(self, before: str | None, reason: str) -> None:
        """Reclassify a finished request."""
        self.finished[before or ""] -= 1
        self.finished[reason] += 1

    def verified(self, drafted: int, accepted: int, source: Origin) -> None:
        """Count one row of one step."""
        name = source.name.lower()
        self.drafted_by_source[name] += drafted
        self.accepted_by_source[name] += accepted
        self.first_drafts[name] += drafted > 0
        self.accepted_first_drafts[name] += accepted > 0
        at = self.accepted_per_position
        at += [0] * (drafted - len(at))
        for i in range(accepted):
            at[i] += 1

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.hits_by_tier.total()

    @property
    def drafts(self) -> int:
        """Number of (row, step) pairs that verified at least one draft."""
        return self.first_drafts.total()

    @property
    def draft_tokens(self) -> int:
        """Drafts verified."""
        return self.drafted_by_source.total()

    @property
    def accepted_tokens(self) -> int:
        """Drafts accepted."""
        return self.accepted_by_source.total()

    @property
    def steps(self) -> int:
        """Draft-and-verify steps."""
        return self.depth_steps.total()


@dataclass(kw_only=True)
class EngineStats(Counters):
    """A snapshot of an engine: a copy of its totals, and its present requests and pages.

    Attributes:
        slots: lengths of prompt and output, status and number of pages of each request that has a slot.
        waiting: number of requests without a slot.
        pages_used: number of pages held by requests.
        pages_cached: number of pages that only the prefix cache keeps.
        tier: the host's memory as a tier of the prefix cache.
        realised_speedup: ratio of speeds, with drafts and without, of recent steps
            (``DepthController.speedup``); None while unknown.
        experts: counts and moves of experts; None where no experts are counted.
    """

    slots: tuple[tuple[int, int, str, int], ...]
    waiting: int
    pages_total: int
    pages_used: int
    pages_cached: int
    tier: TierStats
    preemptions: int
    executables: int
    realised_speedup: float | None
    experts: ExpertStats | None = None

    @classmethod
    def of(
        cls,
        counters: Counters,
        scheduler: Scheduler,
        tier: HostTier | None,
        executables: int,
        realised_speedup: float | None,
        experts: ExpertStats | None = None,
    ) -> "EngineStats":
        """A snapshot of these parts of an engine."""
        pools = scheduler.pools
        total, available = sum(p.pages for p in pools), sum(p.available for p in pools)
        return cls(
            **{f.name: copy(getattr(counters, f.name)) for f in fields(counters)},
            slots=tuple(
                (len(r.prompt), len(r.progress.output), r.status.value, len(r.residence.pages))
                for r in scheduler.slots
                if r
            ),
            waiting=len(scheduler.waiting),
            pages_total=total,
            pages_used=total - available,
            pages_cached=sum(p.cached for p in pools),
            tier=tier.stats() if tier else TierStats(),
            preemptions=scheduler.preemptions,
            executables=executables,
            realised_speedup=realised_speedup,
            experts=experts,
        )

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self.slots)
