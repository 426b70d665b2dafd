"""The one book of measured seconds: times of launches, and of the work that they defer. No jax."""

import time
from collections import deque


class Timings:
    """Launches run one after the other: each took from its launch, or from the later end of the one before.

    Attributes:
        last_read: ``time.perf_counter()`` when a launch was last seen to have ended.
        deferring: seconds that the work which it deferred cost later, per step without drafts, on average
            over the last two flushes.
    """

    def __init__(self) -> None:
        self.last_read = 0.0
        self.deferring = 0.0
        self._settled = False
        self._flushes: deque[tuple[float, int]] = deque(maxlen=2)

    def ended(self, at: float) -> float:
        """A launch that began at ``at`` has just been seen to have ended. Returns the seconds it took."""
        now = time.perf_counter()
        seconds = now - max(at, self.last_read)
        self.last_read = now
        return seconds

    def flushed(self, seconds: float, steps: int) -> None:
        """Book the time of the work that ``steps`` steps deferred: these steps caused it.

        The first flush is not charged: the first run of a program may take many times longer.
        """
        if self._settled:
            self._flushes.append((seconds, steps))
            self.deferring = sum(s for s, _ in self._flushes) / sum(n for _, n in self._flushes)
        self._settled = True
