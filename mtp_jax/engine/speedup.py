"""What drafting gains, measured while serving."""

from collections import defaultdict, deque
from collections.abc import Hashable
from statistics import median
from typing import NamedTuple

WINDOW = 2000
"""Steps that count: what is older says nothing of the load, or of the machine, as they are now."""

_ENOUGH = 3
_COVERED = 0.5


class _Step(NamedTuple):
    bucket: Hashable
    depth: int
    seconds: float
    tokens: float


class Speedup:
    """Seconds that the tokens of the newest steps would have taken at depth 0, over the seconds they took.

    Steps are compared within a bucket (slots, pages, sampling), where enough of these steps were at depth 0:
    adaptive depth tries it now and then, and requests may ask for it. A step of any depth counts as the
    median of its kind, or a single hiccup at depth 0, which few steps are at, would count a hundred times.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._steps: deque[_Step] = deque(maxlen=window)

    def add(self, bucket: Hashable, depth: int, seconds: float, tokens: float) -> None:
        """Take a step. bucket: what decides its cost beside the depth. tokens: emitted per row."""
        self._steps.append(_Step(bucket, depth, seconds, tokens))

    @property
    def value(self) -> float | None:
        """None while depth 0 is known for less than half of the time. Any thread may ask."""
        kinds: defaultdict[Hashable, defaultdict[int, list[_Step]]] = defaultdict(lambda: defaultdict(list))
        for step in tuple(self._steps):
            kinds[step.bucket][step.depth].append(step)
        total = took = plain = 0.0
        for by_depth in kinds.values():
            typical = {depth: median(s.seconds for s in steps) for depth, steps in by_depth.items()}
            seconds = sum(typical[depth] * len(steps) for depth, steps in by_depth.items())
            total += seconds
            if len(by_depth.get(0, ())) >= _ENOUGH:
                took += seconds
                # At depth 0 a step counts as itself, whatever became of its tokens.
                plain += typical[0] * sum(
                    s.tokens if d else 1 for d, steps in by_depth.items() for s in steps
                )
        return plain / took if took and took >= _COVERED * total else None
