"""Adaptive depth: each step runs the executable that promises the most tokens per second.

What a step costs is measured, in rehearsals first and then while serving; what it yields is estimated from
how often the draft at each position is accepted. Depth 0 takes part, so speculation is given up where it does
not pay. Whatever is chosen, the tokens are right: trying a depth out costs time only.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from math import log2
from statistics import median

from mtp_jax.decode.keys import StepKey

_ENOUGH = 2  # measurements before a cost is believed
REHEARSED = 8  # runs of a step without drafts before the one that is measured
# Of so many measurements the lower quartile counts: what else the machine does makes steps slower, never
# faster, and for longer than a few of them.
_KEPT = 64
# Looking at a depth that is not chosen may lose this share of the time with one row, and waits for so many
# steps at least.
_LOOKING = 0.005
_LOOK_EVERY = 20
# A look at a deeper one costs so many steps more, where there are many rows: they then end apart.
_UPSETS = 3
# One whose last run was good enough to be the best is run again after so many steps: those before it may have
# been measured in a slow moment, as the steps after a prefill are.
_AGAIN_AFTER = 2
# Steps take longer for so many after a deeper one, the caches being as that left them. What is left of the
# time of the first few: at least, and, until it has been seen, at depth 0 with several rows.
_SETTLES_AFTER, _FIRST, _LEAST, _LIKELY = 16, 5, 0.6, 0.8
_MEMORY = 0.98  # weight of a step's acceptance one step later
_LEAST_PAST = 0.5
_LEAST_WEIGHT = 0.01  # rows that the past counts for: a rate of nothing at all has no value
# Optimistic: drafts that are never tried teach nothing.
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0
# What deeper steps promise counts for so much less with each doubling of the rows from two on, up to a most:
# rows then end apart, prompts come one by one, so that fewer are prefilled together, slots idle until an end
# is read, and steps without drafts are slower than in a row of their own.
_APART, _APART_MOST = 0.12, 0.3
# Another depth must promise so much more than the one that has been best: every change costs some steps.
_CHANGE = 1.05


def adaptive_depths(most: int) -> tuple[int, ...]:
    """The depths that adaptive steps choose from: 0, the odd ones and the deepest."""
    return tuple(sorted({0, *range(1, most + 1, 2), most}))


class StepCosts:
    """Seconds of every step executable, as it takes them once no deeper one has run for a while.

    Steps that run sooner are looks: they are taken to be as much too slow as such steps were seen to be, and
    believed where they took less than was thought.
    """

    def __init__(self) -> None:
        # Rehearsed or settled, and as looks since let expect.
        self._seconds: dict[StepKey, deque[float]] = {}
        self._looks: dict[StepKey, deque[float]] = {}
        self._believed: dict[StepKey, float] = {}
        # What settled steps take of the first ones, by slots and depth.
        self._share: dict[tuple[int, int], float] = {}
        self._steps = 0
        # The step at which each depth was last run.
        self._run_at: dict[int, int] = {}
        # Seconds of the steps since a deeper one, if all were of one program.
        self._row: list[float] = []
        self._last: StepKey | None = None

    def rehearsed(self, key: StepKey, seconds: float) -> None:
        """Take what a run of its own took, behind others of it."""
        self._count(key)
        self._add(key, seconds)

    def ran(self, key: StepKey, seconds: float) -> None:
        """Take what a step among others took."""
        since = self._count(key)
        self._believed.pop(key, None)
        if since >= _SETTLES_AFTER:
            self._add(key, seconds)
            return
        share = self._share_of(key)
        settled = seconds * (share + (1 - share) * since / _SETTLES_AFTER)
        if self.known(key):
            self._looks.setdefault(key, deque(maxlen=_FIRST)).append(settled)
        else:
            self._add(key, settled)
        self._row = [*self._row, seconds] if since and key == self._last else [seconds]
        self._last = key
        if len(self._row) == _SETTLES_AFTER:
            self._settled(key, share)

    def _count(self, key: StepKey) -> int:
        """Count a run. Returns how many there were since one of a deeper program."""
        self._steps += 1
        self._run_at[key.depth] = self._steps
        deeper = [step for depth, step in self._run_at.items() if depth > key.depth]
        return self._steps - max(deeper, default=-_SETTLES_AFTER) - 1

    def _settled(self, key: StepKey, share: float) -> None:
        seen = min(max(median(self._row[-_FIRST:]) / median(self._row[:_FIRST]), _LEAST), 1)
        of = (key.slots, key.depth)
        if of in self._share:
            seen = (seen + share) / 2
        else:  # what rehearsals showed hung on a guess
            self._seconds[key] = deque(self._row[-_FIRST:], maxlen=_KEPT)
            self._looks.pop(key, None)
        self._share[of] = seen

    def _add(self, key: StepKey, seconds: float) -> None:
        self._seconds.setdefault(key, deque(maxlen=_KEPT)).append(seconds)
        self._looks.pop(key, None)
        self._believed.pop(key, None)

    def _share_of(self, key: StepKey) -> float:
        return self._share.get((key.slots, key.depth), 1 if key.depth or key.slots == 1 else _LIKELY)

    def known(self, key: StepKey) -> bool:
        """Whether there are enough measurements."""
        return len(self._seconds.get(key, ())) >= _ENOUGH

    def seconds(self, key: StepKey) -> float:
        """What the step takes, as far as is known."""
        found = self._believed.get(key)
        if found is None:
            usual, looks = _usual(self._seconds[key]), self._looks.get(key)
            self._believed[key] = found = _between(usual, _usual(looks)) if looks else usual
        return found

    def newest(self, key: StepKey) -> float:
        """What the step took when it was last run."""
        looks = self._looks.get(key)
        return _between(self.seconds(key), looks[-1]) if looks else self._seconds[key][-1]


def _usual(seen: Collection[float]) -> float:
    return sorted(seen)[len(seen) // 4]


def _between(usual: float, look: float) -> float:
    return min(max(usual, _LEAST * look), look)


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
            past = min(max(past, _LEAST_WEIGHT / self._tried[i]), 1)
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
        self._steps, self._best = 0, 0
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
        tokens, asked = self.acceptance.tokens(), Counter(depths).items()

        apart = min(_APART * max(log2(len(depths)) - 1, 0), _APART_MOST)

        def worth(depth: int) -> float:
            expected = sum(tokens[min(depth, d)] * rows for d, rows in asked)
            kept = min(self._emitted[depth] / self._verified[depth], 1)
            return expected * kept * (1 - apart if depth else 1)

        seconds = [self.costs.seconds(key) for key in candidates]
        worths = [worth(key.depth) for key in candidates]
        rates = [w / s for w, s in zip(worths, seconds, strict=True)]
        best = rates.index(max(rates))
        before = [i for i, key in enumerate(candidates) if key.depth == self._best]
        best = next((i for i in before if rates[i] * _CHANGE > rates[best]), best)
        self._best = candidates[best].depth
        for i, key in enumerate(candidates):
            waited = self._steps - self._run_at[key.depth]
            if i == best or waited < _AGAIN_AFTER:
                continue
            lost = (1 - rates[i] / rates[best]) * seconds[i] / seconds[best]
            if key.depth > candidates[best].depth:
                lost += _UPSETS * (1 - 1 / len(depths))
            hopeful = worths[i] / self.costs.newest(key) > rates[best] * _CHANGE
            if hopeful or waited >= max(lost / _LOOKING, _LOOK_EVERY):
                return key
        return candidates[best]
