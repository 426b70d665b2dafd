"""The one book of measured seconds: how long every launch took, by what it ran. No jax here."""

import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

FLUSH = "flush"
"""What the drafter's deferred work is booked under: a launch of its own."""


class Timings:
    """Launches run one after the other: the time of each began when it was launched or when the one before it
    ended, whichever came later.

    Attributes:
        last_read: ``time.perf_counter()`` when a launch was last seen to have ended.
        deferring: seconds that the work which it deferred cost later, per step without drafts, on average
            over the last two flushes.
    """

    def __init__(self) -> None:
        self.last_read = 0.0
        self.deferring = 0.0
        # Of the last two runs.
        self._took: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque((0.0, 0.0), maxlen=2))
        self._flushes: deque[tuple[float, int]] = deque(maxlen=2)

    def ended(self, at: float) -> float:
        """A launch that began at ``at`` has just been seen to have ended. Returns the seconds it took."""
        now = time.perf_counter()
        seconds = now - max(at, self.last_read)
        self.last_read = now
        return seconds

    def record(self, key: Hashable, seconds: float) -> None:
        """Book what a launch took."""
        self._took[key].append(seconds)

    def flushed(self, seconds: float, steps: int) -> None:
        """Book what the work that ``steps`` steps deferred took: those steps caused it.

        The first flush is not charged: the first run of a program may take many times longer.
        """
        first = FLUSH not in self._took
        self.record(FLUSH, seconds)
        if first:
            return
        self._flushes.append((seconds, steps))
        self.deferring = sum(s for s, _ in self._flushes) / sum(n for _, n in self._flushes)

    def ahead(self, at: float, keys: Iterable[Hashable]) -> float:
        """Seconds until launches of these keys have ended, the first of which began at ``at``.

        Each is expected to take as long as the quicker of its last two runs, or no time before there were
        two: the first run of a program may take many times longer.
        """
        return sum(min(self._took[key]) for key in keys) + max(at, self.last_read) - time.perf_counter()
