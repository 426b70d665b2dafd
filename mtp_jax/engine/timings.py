"""Measured seconds of launches, and of the work that they defer. No jax."""

from collections import deque
from collections.abc import Callable


class Timings:
    """Times of launches. Each runs from its launch, or from the end of the launch before it if that is later.

    Attributes:
        last_read: the clock's seconds when the host last read a launch's end.
        deferring: seconds of a flush per step that deferred work to it, on average over the last two flushes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_read = 0.0
        self.deferring = 0.0
        self._settled = False
        self._flushes: deque[tuple[float, int]] = deque(maxlen=2)

    def ended(self, at: float) -> float:
        """Record that a launch that began at ``at`` has just ended. Returns the seconds that it took."""
        now = self._clock()
        seconds = now - max(at, self.last_read)
        self.last_read = now
        return seconds

    def flushed(self, seconds: float, steps: int) -> None:
        """Charge the time of a flush to the ``steps`` steps that deferred its work.

        The first flush is not charged: the first run of a program may take many times longer.
        """
        if self._settled:
            self._flushes.append((seconds, steps))
            self.deferring = sum(s for s, _ in self._flushes) / sum(n for _, n in self._flushes)
        self._settled = True
