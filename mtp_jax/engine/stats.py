"""What an engine has done so far, counted."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

UNPROFILED = "unprofiled"
"""The phase of steps whose executable has not been profiled."""


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
        program_steps: steps by executable.
        phase_shares: of the time of an executable's steps, the share of each phase, once it was profiled.
        phase_seconds: seconds of steps by phase, by these shares.
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
    program_steps: Counter[Hashable] = field(default_factory=Counter)
    phase_shares: dict[Hashable, Mapping[str, float]] = field(default_factory=dict)
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def stepped(self, program: Hashable, depth: int, seconds: float) -> None:
        """Count one step."""
        self.depth_steps[depth] += 1
        self.depth_seconds[depth] += seconds
        self.program_steps[program] += 1
        for phase, share in self.phase_shares.get(program, {UNPROFILED: 1.0}).items():
            self.phase_seconds[phase] += share * seconds

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
        phase_seconds: the same seconds by phase: those of executables that were profiled, by the shares found
            then, and those of the others under ``UNPROFILED``.
        finished: requests by finish reason.
        realised_speedup: of recent steps, by recent steps at depth 0 (``Speedup``); None while not known.
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
    phase_seconds: dict[str, float]
    prefill_seconds: float
    finished: dict[str, int]
    executables: int
    realised_speedup: float | None

    @property
    def steps(self) -> int:
        """Draft-and-verify steps."""
        return sum(self.depth_steps.values())
