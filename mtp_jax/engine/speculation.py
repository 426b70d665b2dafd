"""Figures of emitted tokens: results of drafting, and log-probabilities."""

from dataclasses import dataclass, field

from mtp_jax.decode.keys import Origin


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability under the model, before any transform; rank 1 is the best."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]


@dataclass
class Speculation:
    """Results of drafting for one request. Drafts verified after its last token are counted too."""

    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    source_per_step: list[Origin] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps that drafted and verified."""
        return len(self.accepted_per_step)

    @property
    def drafted(self) -> int:
        """Number of drafts verified."""
        return sum(self.drafted_per_step)

    @property
    def accepted(self) -> int:
        """Number of drafts accepted."""
        return sum(self.accepted_per_step)

    def of(self, source: Origin) -> "Speculation":
        """Counts of the steps whose drafts came from this source."""
        chosen = [i for i, own in enumerate(self.source_per_step) if own == source]
        accepted, drafted = (
            [own[i] for i in chosen] for own in (self.accepted_per_step, self.drafted_per_step)
        )
        return Speculation(accepted, drafted, [source] * len(chosen))

    @property
    def drafter(self) -> "Speculation":
        """Counts of the steps whose drafts are the drafter's, and no suffix matches."""
        return self.of(Origin.NEXTN) + self.of(Origin.OTHER)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Number of accepted drafts at each position."""
        deepest = max(self.drafted_per_step, default=0)
        return tuple(sum(a > i for a in self.accepted_per_step) for i in range(deepest))

    @property
    def acceptance_length(self) -> float:
        """Tokens per step: accepted drafts + 1, on average; 0.0 before the first step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    def since(self, step: int) -> "Speculation":
        """Counts of all steps but the first ``step``."""
        return Speculation(
            self.accepted_per_step[step:], self.drafted_per_step[step:], self.source_per_step[step:]
        )

    def __add__(self, other: "Speculation") -> "Speculation":
        return Speculation(
            self.accepted_per_step + other.accepted_per_step,
            self.drafted_per_step + other.drafted_per_step,
            self.source_per_step + other.source_per_step,
        )

    def __iadd__(self, other: "Speculation") -> "Speculation":
        self.accepted_per_step += other.accepted_per_step
        self.drafted_per_step += other.drafted_per_step
        self.source_per_step += other.source_per_step
        return self
