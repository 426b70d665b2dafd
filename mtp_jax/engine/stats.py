"""What an engine has done so far, counted."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Running totals. Only the engine changes them.

    Attributes:
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: those of them that were found.
        drafts: rows that verified at least one draft, one per row and step.
        accepted_at: how often the draft at each position was accepted.
        depth_steps: steps by depth.
        depth_seconds: seconds of those steps.
        finished: requests by finish reason.
        compared_seconds: seconds of the steps whose cost at depth 0 is known.
        plain_seconds: what the tokens of those steps would have taken at depth 0.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    depth_steps: Counter[int] = field(default_factory=Counter)
    depth_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    prefill_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    compared_seconds: float = 0.0
    plain_seconds: float = 0.0

    def verified(self, drafted: int, accepted: int) -> None:
        """Count one row of one step."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
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
        drafts: rows that verified at least one draft, one per row and step.
        draft_tokens: drafts verified.
        accepted_per_position: how often the draft at each position was accepted.
        depth_steps: steps by depth.
        step_seconds: seconds of those steps, from the end of what ran before.
        finished: requests by finish reason.
        realised_speedup: seconds the tokens would have taken at depth 0, by the measured cost of depth-0
            steps in the same bucket, over the seconds they took; None where depth 0 never ran.
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
    preemptions: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    depth_steps: dict[int, int]
    step_seconds: dict[int, float]
    prefill_seconds: float
    finished: dict[str, int]
    executables: int
    realised_speedup: float | None

    @property
    def steps(self) -> int:
        """Draft-and-verify steps."""
        return sum(self.depth_steps.values())
