"""What an engine has done so far, counted."""

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from mtp_jax.decode.keys import Source
from mtp_jax.engine.balance import ExpertStats
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.store.tier import HostTier, TierStats

_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


@dataclass
class Histogram:
    """How often values fell into each bucket.

    Attributes:
        bounds: upper ends of all buckets but the last, which has none.
        counts: one per bucket.
        sum: of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float, times: int) -> None:
        """Count a value, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        """One that does not change."""
        return Histogram(self.bounds, [*self.counts], self.sum)


@dataclass
class Counters:
    """Running totals. Only the engine changes them.

    Attributes:
        generation_tokens: emitted, those that a stop string cut off included.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: those of them that were found.
        restored: those of them that came from the host's memory.
        drafts: rows that verified at least one draft, one per row and step.
        drafted_by: drafts verified, by where they came from.
        accepted_by: those of them that were accepted.
        first_by: rows that verified drafts, by where these came from.
        first_accepted_by: those of them whose first draft was accepted.
        accepted_at: how often the draft at each position was accepted.
        inter_token: seconds from token to token of a request; tokens of one step share the time since the
            step before.
        depth_steps: steps by depth, of those that advanced requests.
        depth_seconds: seconds of those steps.
        prefill_seconds: of steps that had nothing but prompts.
        finished: requests by finish reason.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    restored: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    drafted_by: Counter[Source] = field(default_factory=Counter)
    accepted_by: Counter[Source] = field(default_factory=Counter)
    first_by: Counter[Source] = field(default_factory=Counter)
    first_accepted_by: Counter[Source] = field(default_factory=Counter)
    accepted_at: list[int] = field(default_factory=list)
    inter_token: Histogram = field(default_factory=lambda: Histogram.empty(_GAPS))
    depth_steps: Counter[int] = field(default_factory=Counter)
    depth_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    prefill_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)

    def stepped(self, depth: int, seconds: float) -> None:
        """Count one step."""
        self.depth_steps[depth] += 1
        self.depth_seconds[depth] += seconds

    def ended_anew(self, before: str | None, reason: str) -> None:
        """Reclassify a finished request."""
        self.finished[before or ""] -= 1
        self.finished[reason] += 1

    def verified(self, drafted: int, accepted: int, source: Source) -> None:
        """Count one row of one step."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.drafted_by[source] += drafted
        self.accepted_by[source] += accepted
        self.first_by[source] += drafted > 0
        self.first_accepted_by[source] += accepted > 0
        while len(self.accepted_at) < drafted:
            self.accepted_at.append(0)
        for i in range(accepted):
            self.accepted_at[i] += 1


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine: what it holds now, and its totals.

    Attributes:
        running: requests that have a slot.
        waiting: requests that have none.
        pages_used: pages held by requests.
        pages_cached: pages that only the prefix cache keeps.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: those of them that were found.
        hits_by_tier: the same by where they were: "device" or "host".
        tier: the host's memory as a tier of the prefix cache.
        drafts: rows that verified at least one draft, one per row and step.
        draft_tokens: drafts verified.
        drafted_by_source: the same by where they came from: "nextn" or "suffix".
        accepted_by_source: those of them that were accepted.
        first_drafts: rows that verified drafts, by source.
        accepted_first_drafts: those of them whose first draft was accepted.
        accepted_per_position: how often the draft at each position was accepted.
        inter_token: seconds from token to token of a request; tokens of one step share the time since the
            step before.
        depth_steps: steps by depth, of those that advanced requests.
        step_seconds: seconds of those steps, from the end of what ran before.
        prefill_seconds: of steps that had nothing but prompts.
        finished: requests by finish reason.
        realised_speedup: of recent steps (``DepthController.speedup``); None while not known.
        experts: how evenly they are chosen; None where nothing is counted.
    """

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    pages_cached: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    hits_by_tier: dict[str, int]
    tier: TierStats
    preemptions: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    first_drafts: dict[str, int]
    accepted_first_drafts: dict[str, int]
    accepted_per_position: tuple[int, ...]
    inter_token: Histogram
    depth_steps: dict[int, int]
    step_seconds: dict[int, float]
    prefill_seconds: float
    finished: dict[str, int]
    executables: int
    realised_speedup: float | None
    experts: ExpertStats | None = None

    @classmethod
    def of(
        cls,
        c: Counters,
        scheduler: Scheduler,
        tier: HostTier | None,
        executables: int,
        realised_speedup: float | None,
        experts: ExpertStats | None = None,
    ) -> "EngineStats":
        """What an engine's parts say now."""
        pools = scheduler.pools
        total, available = sum(p.pages for p in pools), sum(p.available for p in pools)
        return cls(
            running=sum(r is not None for r in scheduler.slots),
            waiting=len(scheduler.waiting),
            pages_total=total,
            pages_used=total - available,
            pages_cached=sum(p.cached for p in pools),
            prompt_tokens=c.prompt_tokens,
            generation_tokens=c.generation_tokens,
            prefix_queries=c.prefix_queries,
            prefix_hits=c.prefix_hits,
            hits_by_tier={"device": c.prefix_hits - c.restored, "host": c.restored},
            tier=tier.stats() if tier else TierStats(),
            preemptions=scheduler.preemptions,
            drafts=c.drafts,
            draft_tokens=c.draft_tokens,
            accepted_tokens=sum(c.accepted_at),
            drafted_by_source={s.name.lower(): c.drafted_by[s] for s in Source},
            accepted_by_source={s.name.lower(): c.accepted_by[s] for s in Source},
            first_drafts={s.name.lower(): c.first_by[s] for s in Source},
            accepted_first_drafts={s.name.lower(): c.first_accepted_by[s] for s in Source},
            accepted_per_position=tuple(c.accepted_at),
            inter_token=c.inter_token.copy(),
            depth_steps=dict(c.depth_steps),
            step_seconds=dict(c.depth_seconds),
            prefill_seconds=c.prefill_seconds,
            finished=dict(c.finished),
            executables=executables,
            realised_speedup=realised_speedup,
            experts=experts,
        )

    @property
    def steps(self) -> int:
        """Draft-and-verify steps."""
        return sum(self.depth_steps.values())
