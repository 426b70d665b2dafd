"""Comparison of the estimate with published speeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_jax.lab.planning.published import FITTED, HELD_OUT, ORDERED, V4, Point
from mtp_jax.lab.planning.step_time import band


@dataclass(frozen=True)
class Compared:
    """A published point and its estimate, tokens per second with usual and with lean software."""

    point: Point
    usual: float
    lean: float

    @property
    def middle(self) -> float:
        """The geometric mean of the band."""
        return math.sqrt(self.usual * self.lean)

    @property
    def error(self) -> float:
        """Relative error of the middle: 0.1 where the estimate is a tenth too high."""
        return self.middle / self.point.rate - 1

    @property
    def inside(self) -> bool:
        """Whether the published figure lies in the band."""
        return self.usual <= self.point.rate <= self.lean


def compare(point: Point) -> Compared:
    """The estimate of a published point."""
    d = point.deployment
    tokens = d.tokens_per_step * (1 if point.per_user else d.requests / d.gpus)
    usual, lean = (tokens / seconds for seconds in band(d).seconds)
    return Compared(point, usual, lean)


def median_error(compared: Sequence[Compared]) -> float:
    """The median error of the middles, as a factor less one; too high and too low count alike."""
    logs = [abs(math.log1p(c.error)) for c in compared]
    return math.expm1(statistics.median(logs))


def orderings() -> list[tuple[str, str, bool]]:
    """Pairs of held-out points: (faster as published, slower, whether the estimate agrees)."""
    middle = {p.name: compare(p).middle for p in HELD_OUT}
    return [(faster, slower, middle[faster] > middle[slower]) for faster, slower in ORDERED]


def text() -> str:
    """The comparison as text: the fitted points, the held-out points, medians and orderings."""
    after, parts = "looked up after the fit", []
    for title, points in (
        ("Fitted", FITTED),
        (f"Held out: {after}", HELD_OUT),
        (f"DeepSeek-V4: {after}", V4),
    ):
        compared = [compare(p) for p in points]
        inside = sum(c.inside for c in compared)
        parts.append(
            f"{title}\n\n{_table(compared)}\n\n{inside} of {len(compared)} lie in the band; "
            f"median error of its middle {median_error(compared):.0%}"
        )
    agreed = [f"{'yes' if ok else 'NO':<4}{faster}  >  {slower}" for faster, slower, ok in orderings()]
    parts.append("\n".join(["Faster per GPU, as published: does the estimate say so?", "", *agreed]))
    return "\n\n".join(parts)


def _table(compared: Sequence[Compared]) -> str:
    """Tokens per second of one GPU, or of one user where there is one request."""
    lines = [f"{'':<55}{'source':<8}{'published':>9}{'usual':>8}{'lean':>8}{'error':>7}"]
    for c in compared:
        name = c.point.name + "*" * bool(c.point.open)
        lines.append(
            f"{name:<55}{c.point.source:<8}{c.point.rate:>9,.0f}"
            f"{c.usual:>8,.0f}{c.lean:>8,.0f}{c.error:>+7.0%}"
        )
    return "\n".join([*lines, "* with an assumption, see mtp_jax/lab/planning/published.toml"])
