"""Median and quartiles of repeated measurements."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements, and their number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Median and quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))

    def show(self, digits: int = 2, scale: float = 1.0) -> str:
        """``median (low-high)``."""
        median, low, high = (f"{v * scale:.{digits}f}" for v in (self.median, self.low, self.high))
        return f"{median} ({low}-{high})"
