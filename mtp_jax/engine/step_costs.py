"""Seconds of steps, measured while they run. No jax."""

import math
from collections import defaultdict, deque
from enum import IntEnum
from math import exp, log
from statistics import median, median_low

from mtp_jax.engine.depth_policy import DepthPolicy, StepDepths


class Standing(IntEnum):
    """Trust in a measured step; the more, the higher."""

    FIRST = 0
    """Right after another way, whose data fill the caches."""
    EMPTY = 1
    """Over empty slots, in warm-up."""
    SERVED = 2


class Costs:
    """Cost of one bucket's steps for each way (``StepDepths``): seconds, divided by the machine's pace.

    A cost is a lower median, as a step is often slower than it should be and never faster. Two measurements
    of a higher standing replace all of a lower one.

    The pace is the time of the incumbent's newest steps, relative to its cost. A slow spell of the machine
    moves the pace alone. The first steps of a new incumbent are read against the pace of the one before, and
    renew its cost: where two ways take turns as the incumbent, neither is ever probed.
    """

    def __init__(self, policy: DepthPolicy) -> None:
        def window() -> deque[float]:
            return deque(maxlen=policy.kept)

        self._policy = policy
        self._seen: defaultdict[tuple[StepDepths, Standing], deque[float]] = defaultdict(window)
        self._cost: dict[StepDepths, float] = {}  # median logarithms
        self._standing: dict[StepDepths, Standing] = {}
        self._paces, self._pace = window(), 0.0
        self._waited: dict[StepDepths, float] = {}
        # The count of steps, and its value when each way was last measured with settled caches.
        self._steps, self._settled = 0, dict[StepDepths, int]()
        # The incumbent, which sets the pace, and the number of its next steps that renew its cost.
        self._pacer: StepDepths | None = None
        self._renewals = 0
        self.incumbent: StepDepths | None = None

    def known(self, way: StepDepths) -> bool:
        """Whether the way was ever measured."""
        return way in self._cost

    def served(self, way: StepDepths) -> bool:
        """Whether its cost was measured while serving."""
        return self._standing.get(way) == Standing.SERVED

    def fresh(self, way: StepDepths) -> bool:
        """Whether it has been measured with settled caches, while serving or in warm-up, and not long ago.

        "Not long ago" means within kept * memory steps.
        """
        since = self._steps - self._settled.get(way, -math.inf)
        return since < self._policy.kept * self._policy.memory

    def seconds(self, way: StepDepths) -> float:
        """Seconds of a step at the present pace.

        Until it was measured while serving, a way costs no more than a deeper one.
        """
        cost = self._cost[way]
        if not self.served(way):
            cost = min(c for other, c in self._cost.items() if other[0] >= way[0] and other[1] >= way[1])
        return exp(cost + self._pace)

    @property
    def every(self) -> dict[StepDepths, float]:
        """Seconds of a step at the present pace, by way."""
        return {way: self.seconds(way) for way in self._cost}

    def waited(self, way: StepDepths) -> float:
        """Seconds of this bucket's steps since this way ran."""
        return self._waited.get(way, 0.0)

    def add(self, way: StepDepths, seconds: float, standing: Standing) -> None:
        """Add a step's time."""
        for other in self._waited:
            self._waited[other] += seconds
        self._waited[way] = 0.0
        settled = standing > Standing.FIRST
        if settled and way == self.incumbent and self.served(way) and not self._renews(way):
            self._paces.append(log(seconds) - self._cost[way])
            self._pace = median(self._paces)
        elif not self.known(way) or (settled and standing >= self._standing[way]):
            self._learn(way, log(seconds) - self._pace, standing)
        self._steps += 1
        if settled:
            self._settled[way] = self._steps

    def _renews(self, incumbent: StepDepths) -> bool:
        """Whether a settled step is one of the first since its way became the incumbent.

        The number of first steps is that of a probe's measured steps. Their median over several turns is
        right, even if the pace changes.
        """
        if incumbent != self._pacer:
            self._renewals = 0 if self._pacer is None else self._policy.block // 2
            self._pacer = incumbent
        self._renewals -= 1
        return self._renewals >= 0

    def _learn(self, way: StepDepths, level: float, standing: Standing) -> None:
        seen = self._seen[way, standing]
        seen.append(level)
        if len(seen) > 1 or self._standing.get(way, standing) == standing:
            self._standing[way], self._cost[way] = standing, median_low(seen)
