"""Adaptive depth: each step runs the executable that promises the most tokens per second.

What a step costs is measured, in rehearsals first and then while serving; what it yields is estimated from
how often the draft at each position is accepted. Depth 0 takes part, so speculation is given up where it does
not pay. Whatever is chosen, the tokens are right: trying a depth out costs time only.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from mtp_jax.decode.compiled import StepKey

_ENOUGH = 2  # measurements before a cost is believed
# Few: what else the machine does makes wide steps up to twice as slow, for seconds at a time.
_KEPT = 5
# Looking at a depth that is not chosen may lose this share of the time with one row, and waits for so many
# steps at least.
_LOOKING = 0.005
_LOOK_EVERY = 20
# One whose last run was good enough to be the best is run again after so many steps: those before it may have
# been measured in a slow moment, as the steps after a prefill are.
_AGAIN_AFTER = 2
# The first steps after those of another program are slower, caches and clocks being as those left them: up to
# so much, as far as is believed of them, and for so long.
_SETTLED, _SETTLES_AFTER = 0.6, 8
_MEMORY = 0.98  # weight of a step's acceptance one step later
_LEAST_PAST = 0.5
# Optimistic: drafts that are never tried teach nothing.
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0
# A depth is worth drafting if it beats depth 0 by more than this: rows then end apart, and prompts come one
# by one, so that fewer of them are prefilled together.
_CLEARLY = 0.9


def adaptive_depths(most: int) -> tuple[int, ...]:
    """The depths that adaptive steps choose from: 0, the odd ones and the deepest."""
    return tuple(sorted({0, *range(1, most + 1, 2), most}))


class StepCosts:
    """Measured seconds of every step executable: rehearsed or settled, and in looks since."""

    def __init__(self) -> None:
        self._seconds: dict[StepKey, deque[float]] = {}
        self._looks: dict[StepKey, deque[float]] = {}
        self._last: StepKey | None = None
        self._in_a_row = 0

    def add(self, key: StepKey, seconds: float) -> None:
        """Take a measurement."""
        self._seconds.setdefault(key, deque(maxlen=_KEPT)).append(seconds)
        self._looks.pop(key, None)

    def ran(self, key: StepKey, seconds: float) -> None:
        """Take what a step among others took."""
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        if self._in_a_row > _SETTLES_AFTER or not self.known(key):
            self.add(key, seconds)
        else:
            self._looks.setdefault(key, deque(maxlen=_KEPT)).append(seconds)

    def known(self, key: StepKey) -> bool:
        """Whether there are enough measurements."""
        return len(self._seconds.get(key, ())) >= _ENOUGH

    def seconds(self, key: StepKey) -> float:
        """What the step takes: the median, or of two measurements the lower, as first runs are slow.

        As far as looks have not shown otherwise: they take more than settled steps, but not any longer.
        """
        seen, looks = self._seconds[key], self._looks.get(key)
        usual = median(seen) if len(seen) > _ENOUGH else min(seen)
        return _between(usual, median(looks)) if looks else usual

    def newest(self, key: StepKey) -> float:
        """What the step took when it was last run."""
        looks = self._looks.get(key)
        return _between(self.seconds(key), looks[-1]) if looks else self._seconds[key][-1]


def _between(usual: float, look: float) -> float:
    return min(max(usual, _SETTLED * look), look)


class Acceptance:
    """How often the draft at each position is accepted, given that those before it were; the past fades."""

    def __init__(self, most: int) -> None:
        self._tried = [_PRIOR_WEIGHT] * most
        self._held = [_PRIOR_WEIGHT * _PRIOR] * most
        self._looked = [0] * most
        self._steps = 0

    def add(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take one step's rows: drafts verified and drafts accepted of each."""
        self._steps += 1
        deepest = max(drafted, default=0)
        for i in range(deepest):
            tried = sum(n > i and a >= i for n, a in zip(drafted, accepted, strict=True))
            held = sum(a > i for a in accepted)
            # After a long time without a look, what was seen before counts for little.
            past = max(_MEMORY ** (self._steps - self._looked[i]), _LEAST_PAST)
            self._looked[i] = self._steps
            self._tried[i] = self._tried[i] * past + tried
            self._held[i] = self._held[i] * past + held

    def tokens(self) -> list[float]:
        """Expected tokens of a row per step, at depth 0, 1, 2, ..."""
        expected, reach = [1.0], 1.0
        for tried, held in zip(self._tried, self._held, strict=True):
            reach *= held / tried
            expected.append(expected[-1] + reach)
        return expected


class DepthController:
    """Chooses the executable of every step, from measured costs and acceptance."""

    def __init__(self, most: int) -> None:
        self.costs, self.acceptance = StepCosts(), Acceptance(most)
        self._steps = 0
        # The step at which each depth was last run.
        self._run_at = [0] * (most + 1)
        # Tokens by depth: verified, and emitted. Fewer, because rows end within a step, and because a step
        # may be on its way when the one before it turns out to be the last.
        self._verified = [_PRIOR_WEIGHT] * (most + 1)
        self._emitted = [_PRIOR_WEIGHT] * (most + 1)

    def learn(
        self, key: StepKey, seconds: float, depths: Sequence[int], rows: Sequence[tuple[int, int, int]]
    ) -> None:
        """Take a step that ended. ``rows``: drafts verified, drafts accepted and tokens emitted of each."""
        drafted, accepted, emitted = zip(*rows, strict=True)
        tokens = self.acceptance.tokens()
        # A row that had ended before emits nothing, and what it would have emitted is not known.
        verified = sum(
            a + 1 if e else tokens[min(key.depth, d)]
            for d, a, e in zip(depths, accepted, emitted, strict=True)
        )
        self._verified[key.depth] = self._verified[key.depth] * _MEMORY + verified
        self._emitted[key.depth] = self._emitted[key.depth] * _MEMORY + sum(emitted)
        self.acceptance.add(drafted, accepted)
        self.costs.ran(key, seconds)

    def choose(self, keys: Iterable[StepKey], depths: Sequence[int]) -> StepKey:
        """The best of ``keys``, or one that must be measured. ``depths``: the most each row verifies."""
        chosen = self._choose(list(dict.fromkeys(keys)), depths)
        self._steps += 1
        self._run_at[chosen.depth] = self._steps
        return chosen

    def _choose(self, candidates: Sequence[StepKey], depths: Sequence[int]) -> StepKey:
        if len(candidates) == 1:
            return candidates[0]
        unknown = [k for k in candidates if not self.costs.known(k)]
        if unknown:
            return max(unknown, key=lambda k: k.depth)
        tokens = self.acceptance.tokens()

        def worth(key: StepKey) -> float:
            expected = sum(tokens[min(key.depth, d)] for d in depths)
            kept = min(self._emitted[key.depth] / self._verified[key.depth], 1)
            return expected * kept * (_CLEARLY if key.depth else 1)

        worths = {key: worth(key) for key in candidates}
        rates = {key: worths[key] / self.costs.seconds(key) for key in candidates}
        best = max(candidates, key=rates.__getitem__)
        for key in candidates:
            lost = (1 - rates[key] / rates[best]) * self.costs.seconds(key) / self.costs.seconds(best)
            hopeful = worths[key] / self.costs.newest(key) > rates[best]
            # Many rows teach more at once, as the square root of their number.
            rarely = lost / _LOOKING * len(depths) ** 0.5
            wait = _AGAIN_AFTER if hopeful else max(rarely, _LOOK_EVERY)
            if self._steps - self._run_at[key.depth] >= wait:
                return key
        return best
