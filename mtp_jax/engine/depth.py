"""Adaptive depth: each step runs the executable that promises the most tokens per second.

The controller measures the cost of steps while it serves, and estimates the tokens of a step from accepted
drafts. Depth 0 takes part, so speculation stops where it does not pay. Every depth gives the right tokens: a
wrong choice costs time only. docs/depth.md has the model and the exploration rule.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np

from mtp_jax.decode.keys import TreeShape
from mtp_jax.engine.survival import Offered, Survival


@dataclass(frozen=True)
class DepthPolicy:
    """The parameters of adaptive depth.

    Attributes:
        budget: share of a bucket's time that the probes of one depth may lose.
        memory: number of steps after which an observation of drafts and of ended rows counts 1/e.
        kept: number of newest measurements whose median is a depth's cost, or the machine's pace.
        block: number of steps of a probe: its first half settles the caches, its second half is measured.
        margin: share of a step's time that another depth must save before it replaces the incumbent; a probe
            is taken to lose this share at least.
        prior: share of drafts that are accepted before any was observed.
        weight: number of drafts that the prior counts for.
    """

    budget: float = 0.005
    memory: float = 200
    kept: int = 9
    block: int = 4
    margin: float = 0.02
    prior: float = 0.7
    weight: float = 4


StepDepths = tuple[int, int]
"""Drafts that a step makes for each row, and drafts that it verifies: of each row where both are equal, else
on average over its slots."""

PLAIN: StepDepths = (0, 0)


class _Key(Protocol):
    """A step's program; ``bucket`` is the same for all ways to do the same work."""

    @property
    def slots(self) -> int: ...
    @property
    def way(self) -> StepDepths: ...
    @property
    def bucket(self) -> object: ...


K = TypeVar("K", bound=_Key)
DepthRow = tuple[int, int, int]
"""Drafts verified, drafts accepted and tokens emitted by one row of a step."""


def adaptive_depths(most: int, steps: int | None = None) -> tuple[int, ...]:
    """The depths that adaptive steps choose from: 0, odd depths and the deepest.

    steps: ``TreeShape.steps``: more drafts than these are a tree, fewer a chain. None: all are chains.
    """
    chain = most if steps is None else min(most, steps)
    return tuple(sorted({0, *range(1, chain + 1, 2), chain, most}))


class Yield:
    """Tokens that a step emits, by its way."""

    def __init__(self, most: int, policy: DepthPolicy, steps: int | None = None) -> None:
        self._policy, self._fade = policy, 1 - 1 / policy.memory
        # Indexed by position: drafts verified, and drafts accepted, where all earlier drafts were accepted.
        chain = most if steps is None else steps
        self._tried, self._held = np.zeros(chain), np.zeros(chain)
        # Trees: their number, and their accepted drafts; before there are any they count as chains.
        self._trees, self._walked, self._more = 0.0, 0.0, most - chain
        # Indexed by way: tokens accepted, and emitted. Fewer are emitted, because rows end within a step,
        # and because a step may be on its way when the one before it turns out to be the last.
        self._due, self._emitted = (defaultdict[StepDepths, float](lambda: policy.weight) for _ in range(2))
        # Drafts that the ranked steps promised to accept, and drafts that they accepted.
        self._promised = self._kept = policy.weight
        self.survival = Survival(most, policy.memory, policy.prior, policy.weight)
        self._curve: _Curve | None = None
        self._tokens = self._expected()

    def add(
        self, way: StepDepths, depths: Sequence[int], rows: Sequence[DepthRow], offered: Offered | None = None
    ) -> None:
        """Add the rows of a step. Older drafts count less with every step, and fade to the prior."""
        depth, verified = way
        self._tried *= self._fade
        self._held *= self._fade
        self._trees *= self._fade
        self._walked *= self._fade
        self._due[way] *= self._fade
        self._emitted[way] *= self._fade
        for (most, (drafted, accepted, emitted)), n in Counter(zip(depths, rows, strict=True)).items():
            if drafted > len(self._tried):
                self._trees += n
                self._walked += n * accepted
            elif depth == verified:
                self._tried[: min(accepted + 1, drafted)] += n
                self._held[:accepted] += n
            # A row that had ended emits no token; its expected number stands in.
            self._due[way] += n * (accepted + 1 if emitted else self._tokens[min(verified, most)])
            self._emitted[way] += n * emitted
        if offered is not None and len(offered.source):
            self._rank(way, offered)
        self._tokens = self._expected()

    def _rank(self, way: StepDepths, offered: Offered) -> None:
        """Learn from margins. A ranked step's drafts count by their chances, verified or not."""
        chance = self.survival.of(offered)
        if way[0] != way[1]:
            reached = np.concatenate([np.ones((len(chance), 1)), chance[:, :-1]], axis=1)
            self._tried += reached.sum(axis=0)
            self._held += chance.sum(axis=0)
            verified = np.arange(chance.shape[1]) < offered.verified[:, None]
            self._promised = self._promised * self._fade + chance[verified].sum()
            self._kept = self._kept * self._fade + offered.accepted.sum()
        self.survival.add(offered)
        if chance.shape[1] == len(self._tried):
            self._curve = self._curve or _Curve(len(self._tried), 1 - self._fade)
            self._curve.add(chance)

    def _expected(self) -> list[float]:
        """Expected tokens of a row that goes on, at depth 0, 1, 2, ..."""
        p = self._policy
        reach = np.cumprod((self._held + p.weight * p.prior) / (self._tried + p.weight))
        chains = [1.0, *(1 + np.cumsum(reach)).tolist()]
        walked = self._walked + p.weight * (chains[-1] - 1)
        return chains + [1 + walked / (self._trees + p.weight)] * self._more

    def tokens(self, key: _Key, asked: Mapping[int, int]) -> float:
        """Expected tokens of a step. asked: numbers of rows, by most drafts to verify."""
        way = depth, verified = key.way
        due = sum(n * self._tokens[min(verified, most)] for most, n in asked.items())
        if depth != verified and self._curve:
            rows = sum(asked.values())
            accepted = self._curve.at(verified * key.slots / rows) * self._kept / self._promised
            due = max(due, rows * (1 + accepted))
        return due * min(self._emitted[way] / self._due[way], 1)


class _Curve:
    """Drafts accepted per row, by drafts verified per row where these are the likeliest of all rows."""

    POINTS = 8  # for each draft; between them the curve is taken to be straight

    def __init__(self, most: int, newest: float) -> None:
        """newest: share of the newest step in a mean over all."""
        self._at, self._newest, self._steps = np.linspace(0, most, most * self.POINTS + 1), newest, 0
        self._accepted = np.zeros_like(self._at)

    def add(self, chance: np.ndarray) -> None:
        """Add a step, with the chance [n, K] of each draft to survive."""
        rows, self._steps = len(chance), self._steps + 1
        best = np.cumsum(np.sort(chance, axis=None)[::-1])
        found = np.interp(self._at, np.arange(chance.size + 1) / rows, np.append(0, best) / rows)
        self._accepted += (found - self._accepted) * max(self._newest, 1 / self._steps)

    def at(self, verified: float) -> float:
        """Drafts accepted per row."""
        return float(np.interp(verified, self._at, self._accepted))


class Costs:
    """Seconds of one bucket's steps, by way, relative to the machine's pace.

    The pace is the time of the incumbent's newest steps, relative to its cost. A slow spell of the machine
    moves the pace alone. The first steps of a new incumbent are read against the pace of the one before, and
    renew its cost: where two ways take turns as the incumbent, neither is ever probed.
    """

    def __init__(self, policy: DepthPolicy) -> None:
        def window() -> deque[float]:
            return deque(maxlen=policy.kept)

        self._policy = policy
        self._seen: defaultdict[StepDepths, deque[float]] = defaultdict(window)
        self._cost: dict[StepDepths, float] = {}  # median logarithms
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

    def fresh(self, way: StepDepths) -> bool:
        """Whether it has been measured with settled caches, while serving or in warm-up, and not long ago.

        "Not long ago" means within kept * memory steps.
        """
        since = self._steps - self._settled.get(way, -math.inf)
        return since < self._policy.kept * self._policy.memory

    def seconds(self, way: StepDepths) -> float:
        """Seconds of a step at the present pace."""
        return exp(self._cost[way] + self._pace)

    @property
    def every(self) -> dict[StepDepths, float]:
        """Seconds of a step at the present pace, by way."""
        return {way: self.seconds(way) for way in self._cost}

    def waited(self, way: StepDepths) -> float:
        """Seconds of this bucket's steps since this way ran."""
        return self._waited.get(way, 0.0)

    def add(self, way: StepDepths, seconds: float, settled: bool) -> None:
        """Add a step's time. settled: whether steps of the same way ran right before it."""
        for other in self._waited:
            self._waited[other] += seconds
        self._waited[way] = 0.0
        if not self.known(way):
            self._learn(way, log(seconds) - self._pace)
        elif settled and way == self.incumbent and not self._renews(way):
            self._paces.append(log(seconds) - self._cost[way])
            self._pace = median(self._paces)
        elif settled:
            self._learn(way, log(seconds) - self._pace)
        self._steps += 1
        if settled:
            self._settled[way] = self._steps

    def _renews(self, incumbent: StepDepths) -> bool:
        """Whether a settled step is one of the first since its way became the incumbent.

        The first steps are as many as a probe measures: their median over several turns is right, even if the
        pace changes.
        """
        if incumbent != self._pacer:
            self._renewals = 0 if self._pacer is None else self._policy.block // 2
            self._pacer = incumbent
        self._renewals -= 1
        return self._renewals >= 0

    def _learn(self, way: StepDepths, level: float) -> None:
        self._seen[way].append(level)
        self._cost[way] = median(self._seen[way])


class DepthController:
    """Chooses the executable of every step, from measured costs and acceptance."""

    def __init__(self, most: int, policy: DepthPolicy | None = None, trees: TreeShape | None = None) -> None:
        """most: number of drafts of the deepest step. trees: see ``adaptive_depths``."""
        self.policy = policy = policy or DepthPolicy()
        self.steps = trees and trees.steps
        self._yield = Yield(most, policy, self.steps)
        self._costs: defaultdict[Any, Costs] = defaultdict(lambda: Costs(policy))
        # The current probe: its way, and the number of its steps that are left.
        self._probe, self._left = PLAIN, 0
        # The way of the last step that was read, and the number of such steps read in a row.
        self._way, self._row = PLAIN, 0
        # Recent seconds: all; those of steps with a cost at depth 0; the same tokens' seconds at depth 0.
        self._took = self._covered = self._plain = 0.0

    def forget(self) -> None:
        """Forget all costs: the next steps measure every way anew."""
        self._costs.clear()
        self._took = self._covered = self._plain = 0.0

    def costs(self, key: _Key) -> Costs:
        """The costs of the key's bucket."""
        return self._costs[key.bucket]

    @property
    def measured(self) -> dict[Any, dict[StepDepths, float]]:
        """Seconds of a step at the present pace, by bucket and way."""
        return {bucket: costs.every for bucket, costs in self._costs.items()}

    @property
    def estimate(self) -> np.ndarray:
        """The estimate by which the device ranks drafts (``ranking.survival``)."""
        return self._yield.survival.estimate

    def learn(
        self,
        key: _Key,
        seconds: float,
        depths: Sequence[int],
        rows: Sequence[DepthRow],
        offered: Offered | None = None,
    ) -> None:
        """Learn from a step that was read, or from a warm-up step over empty slots, which has no rows.

        seconds: without the writing of NextN entries that earlier steps deferred, but with the step's share
        of writing its own deferred entries. depths: the most drafts each row verifies. offered: the drafts of
        rows that went on, if the step hands margins on.
        """
        way = key.way
        self._row = self._row + 1 if way == self._way else 1
        self._way = way
        costs = self.costs(key)
        if seconds > 0:  # the clock may be too coarse for a tiny step
            costs.add(way, seconds, self._row > self.policy.block // 2)
        self._yield.add(way, depths, rows, offered)
        if any(depths) and (emitted := sum(row[2] for row in rows)):
            self._compare(costs, way, seconds, emitted / len(rows))

    def _compare(self, costs: Costs, way: StepDepths, seconds: float, tokens: float) -> None:
        fade = 1 - 1 / self.policy.memory
        self._took = self._took * fade + seconds
        self._covered *= fade
        self._plain *= fade
        if costs.fresh(PLAIN) and costs.known(way):
            self._covered += seconds
            # A step at depth 0 counts with its own seconds; its cost is at most a deeper step's.
            gain = 1 if way == PLAIN else tokens * min(costs.seconds(PLAIN) / costs.seconds(way), 1)
            self._plain += seconds * gain

    @property
    def speedup(self) -> float | None:
        """Seconds that recent tokens would have taken at depth 0, over the seconds they took.

        Steps all of whose rows forbid drafts do not count. At most the tokens per counted step. None while
        depth 0 has not been measured lately for half of the time. Any thread may ask.
        """
        took, covered, plain = self._took, self._covered, self._plain
        return plain / covered if covered and covered >= took / 2 else None

    def rate(self, keys: Sequence[_Key], depths: Sequence[int]) -> float | None:
        """Tokens per second of the best of these keys; None while none is known."""
        asked = Counter(depths)
        known = [(k, costs) for k in keys if (costs := self.costs(k)).known(k.way)]
        return max((self._yield.tokens(k, asked) / costs.seconds(k.way) for k, costs in known), default=None)

    def choose(self, keys: Sequence[K], depths: Sequence[int], price: float | None = None) -> K:
        """The best of these keys, or a key to be measured.

        depths: the most drafts each row verifies. price: tokens that a second is worth; None: the best key's
        rate. A step with prompt tokens needs a price, the ``rate`` of steps without them: prompt tokens take
        time at any depth, so tokens per second would favour deep steps.
        """
        by_way, p = {k.way: k for k in keys}, self.policy
        costs = {way: self.costs(k) for way, k in by_way.items()}
        if len(by_way) == 1:
            costs[keys[0].way].incumbent = keys[0].way
            return keys[0]
        if self._left and self._probe in by_way:
            self._left -= 1
            return by_way[self._probe]
        self._left = 0
        if unknown := [way for way in by_way if not costs[way].known(way)]:
            return by_way[self._begin(max(unknown))]
        asked = Counter(depths)
        seconds = {way: costs[way].seconds(way) for way in by_way}
        tokens = {way: self._yield.tokens(k, asked) for way, k in by_way.items()}
        price = price or max(tokens[way] / seconds[way] for way in by_way)
        loss = {way: seconds[way] - tokens[way] / price for way in by_way}
        best = self._incumbent(loss, seconds, costs)
        # More ways have no more to lose together than the depths would have.
        budget = p.budget * sum(made == verified for made, verified in by_way) / len(by_way)
        for way in by_way:
            lost = p.block * max(loss[way] - loss[best], p.margin * seconds[way])
            if way != best and costs[way].waited(way) * budget >= lost:
                return by_way[self._begin(way)]
        return by_way[best]

    def _incumbent(
        self,
        loss: dict[StepDepths, float],
        seconds: dict[StepDepths, float],
        costs: dict[StepDepths, Costs],
    ) -> StepDepths:
        """The way that loses least, or the way before it where that loses hardly more."""
        best = min(loss, key=loss.__getitem__)
        # A deeper step may need more pages, and so be of another bucket, which has an incumbent of its own.
        before = min((w for w in loss if costs[w].incumbent == w), key=loss.__getitem__, default=best)
        if loss[before] - loss[best] < self.policy.margin * seconds[before]:
            best = before
        costs[best].incumbent = best
        return best

    def _begin(self, way: StepDepths) -> StepDepths:
        self._probe, self._left = way, self.policy.block - 1
        return way
