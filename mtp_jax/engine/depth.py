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

from mtp_jax.decode.keys import TreeShape


@dataclass(frozen=True)
class DepthPolicy:
    """The parameters of adaptive depth.

    Attributes:
        budget: share of a bucket's time that the probes of one depth may lose.
        memory: steps after which an observation of drafts and of ended rows counts 1/e.
        kept: number of newest measurements whose median is a depth's cost, or the machine's pace.
        block: steps of a probe: its first half settles the caches, its second half is measured.
        margin: share of a step's time that another depth must save before it replaces the incumbent; a probe
            is taken to lose this share at least.
        prior: acceptance of a draft before any was observed.
        weight: drafts that the prior counts for.
    """

    budget: float = 0.005
    memory: float = 200
    kept: int = 9
    block: int = 4
    margin: float = 0.02
    prior: float = 0.7
    weight: float = 4


class _Key(Protocol):
    """A step's program and its depth; ``bucket`` is the same for all depths of the same work."""

    @property
    def depth(self) -> int: ...
    @property
    def bucket(self) -> object: ...


K = TypeVar("K", bound=_Key)
Row = tuple[int, int, int]
"""Drafts verified, drafts accepted and tokens emitted by one row of a step."""


def adaptive_depths(most: int, steps: int | None = None) -> tuple[int, ...]:
    """The depths that adaptive steps choose from: 0, odd depths and the deepest.

    steps: ``TreeShape.steps``: more drafts than these are a tree, fewer a chain. None: all are chains.
    """
    chain = most if steps is None else min(most, steps)
    return tuple(sorted({0, *range(1, chain + 1, 2), chain, most}))


class Yield:
    """Tokens that a step emits, by depth."""

    def __init__(self, most: int, policy: DepthPolicy, steps: int | None = None) -> None:
        self._policy = policy
        # Indexed by position: drafts verified, and drafts accepted, where all earlier drafts were accepted.
        chain = most if steps is None else steps
        self._tried, self._held = [0.0] * chain, [0.0] * chain
        # Trees: how many there were, and their accepted drafts; before there were any they count as chains.
        self._trees, self._kept, self._more = 0.0, 0.0, most - chain
        # Indexed by depth: tokens accepted, and emitted. Fewer are emitted, because rows end within a step,
        # and because a step may be on its way when the one before it turns out to be the last.
        self._due, self._emitted = [policy.weight] * (most + 1), [policy.weight] * (most + 1)
        self._tokens = self._expected()

    def add(self, depth: int, depths: Sequence[int], rows: Sequence[Row]) -> None:
        """Add the rows of a step. Older drafts count less with every step, and fade to the prior."""
        fade = 1 - 1 / self._policy.memory
        for i in range(len(self._tried)):
            self._tried[i] *= fade
            self._held[i] *= fade
        self._trees *= fade
        self._kept *= fade
        self._due[depth] *= fade
        self._emitted[depth] *= fade
        for (most, (drafted, accepted, emitted)), n in Counter(zip(depths, rows, strict=True)).items():
            if drafted > len(self._tried):
                self._trees += n
                self._kept += n * accepted
            for i in range(min(accepted + 1, drafted) if drafted <= len(self._tried) else 0):
                self._tried[i] += n
                self._held[i] += n * (i < accepted)
            # A row that had ended emits no token; its expected number stands in.
            self._due[depth] += n * (accepted + 1 if emitted else self._tokens[min(depth, most)])
            self._emitted[depth] += n * emitted
        self._tokens = self._expected()

    def _expected(self) -> list[float]:
        """Expected tokens of a row that goes on, at depth 0, 1, 2, ..."""
        p, expected, reach = self._policy, [1.0], 1.0
        for tried, held in zip(self._tried, self._held, strict=True):
            reach *= (held + p.weight * p.prior) / (tried + p.weight)
            expected.append(expected[-1] + reach)
        if self._more:
            kept = self._kept + p.weight * (expected[-1] - 1)
            expected += [1 + kept / (self._trees + p.weight)] * self._more
        return expected

    def tokens(self, depth: int, asked: Mapping[int, int]) -> float:
        """Expected tokens of a step. asked: numbers of rows, by most drafts to verify."""
        due = sum(n * self._tokens[min(depth, most)] for most, n in asked.items())
        return due * min(self._emitted[depth] / self._due[depth], 1)


class Costs:
    """Seconds of one bucket's steps, by depth, relative to the machine's pace.

    The pace is the time of the incumbent's newest steps, relative to its cost. A slow spell of the machine
    moves the pace alone. The first steps of a new incumbent are read against the pace of the one before, and
    renew its cost: where two depths take turns as the incumbent, neither depth is ever probed.
    """

    def __init__(self, policy: DepthPolicy) -> None:
        def window() -> deque[float]:
            return deque(maxlen=policy.kept)

        self._policy = policy
        self._seen: defaultdict[int, deque[float]] = defaultdict(window)
        self._cost: dict[int, float] = {}  # median logarithms
        self._paces, self._pace = window(), 0.0
        self._waited: dict[int, float] = {}
        # The count of steps, and its value when each depth was last measured with settled caches.
        self._steps, self._settled = 0, dict[int, int]()
        # The incumbent, which sets the pace, and the number of its next steps that renew its cost.
        self._pacer: int | None = None
        self._renewals = 0
        self.incumbent: int | None = None

    def known(self, depth: int) -> bool:
        """Whether the depth was ever measured."""
        return depth in self._cost

    def fresh(self, depth: int) -> bool:
        """Whether it has been measured with settled caches, while serving or in warm-up, and not long ago.

        "Not long ago" means within kept * memory steps.
        """
        since = self._steps - self._settled.get(depth, -math.inf)
        return since < self._policy.kept * self._policy.memory

    def seconds(self, depth: int) -> float:
        """Seconds of a step at the present pace."""
        return exp(self._cost[depth] + self._pace)

    def waited(self, depth: int) -> float:
        """Seconds of this bucket's steps since this depth ran."""
        return self._waited.get(depth, 0.0)

    def add(self, depth: int, seconds: float, settled: bool) -> None:
        """Add a step's time. settled: whether steps of the same depth ran right before it."""
        for d in self._waited:
            self._waited[d] += seconds
        self._waited[depth] = 0.0
        if not self.known(depth):
            self._learn(depth, log(seconds) - self._pace)
        elif settled and depth == self.incumbent and not self._renews(depth):
            self._paces.append(log(seconds) - self._cost[depth])
            self._pace = median(self._paces)
        elif settled:
            self._learn(depth, log(seconds) - self._pace)
        self._steps += 1
        if settled:
            self._settled[depth] = self._steps

    def _renews(self, incumbent: int) -> bool:
        """Whether a settled step is one of the first since its depth became the incumbent.

        The first steps are as many as a probe measures: their median over several turns is right, even if the
        pace changes.
        """
        if incumbent != self._pacer:
            self._renewals = 0 if self._pacer is None else self._policy.block // 2
            self._pacer = incumbent
        self._renewals -= 1
        return self._renewals >= 0

    def _learn(self, depth: int, level: float) -> None:
        self._seen[depth].append(level)
        self._cost[depth] = median(self._seen[depth])


class DepthController:
    """Chooses the executable of every step, from measured costs and acceptance."""

    def __init__(self, most: int, policy: DepthPolicy | None = None, trees: TreeShape | None = None) -> None:
        """most: depth of the deepest step. trees: see ``adaptive_depths``."""
        self.policy = policy = policy or DepthPolicy()
        self.steps = trees and trees.steps
        self._yield = Yield(most, policy, self.steps)
        self._costs: defaultdict[Any, Costs] = defaultdict(lambda: Costs(policy))
        # The current probe: its depth, and the number of its steps that are left.
        self._probe, self._left = 0, 0
        # The depth of the last step that was read, and the number of such steps read in a row.
        self._depth, self._row = 0, 0
        # Recent seconds: all; those of steps with a cost at depth 0; the same tokens' seconds at depth 0.
        self._took = self._covered = self._plain = 0.0

    def forget(self) -> None:
        """Forget all costs: the next steps measure every depth anew."""
        self._costs.clear()
        self._took = self._covered = self._plain = 0.0

    def costs(self, key: _Key) -> Costs:
        """The costs of the key's bucket."""
        return self._costs[key.bucket]

    def learn(self, key: _Key, seconds: float, depths: Sequence[int], rows: Sequence[Row]) -> None:
        """Learn from a step that was read, or from a warm-up step over empty slots, which has no rows.

        seconds: without the writing of NextN entries that earlier steps deferred, but with the step's share
        of writing its own deferred entries. depths: the most drafts each row verifies.
        """
        self._row = self._row + 1 if key.depth == self._depth else 1
        self._depth = key.depth
        costs = self.costs(key)
        if seconds > 0:  # the clock may be too coarse for a tiny step
            costs.add(key.depth, seconds, self._row > self.policy.block // 2)
        self._yield.add(key.depth, depths, rows)
        if any(depths) and (emitted := sum(row[2] for row in rows)):
            self._compare(costs, key.depth, seconds, emitted / len(rows))

    def _compare(self, costs: Costs, depth: int, seconds: float, tokens: float) -> None:
        fade = 1 - 1 / self.policy.memory
        self._took = self._took * fade + seconds
        self._covered *= fade
        self._plain *= fade
        if costs.fresh(0) and costs.known(depth):
            self._covered += seconds
            # A step at depth 0 counts with its own seconds; its cost is at most a deeper step's.
            gain = tokens * min(costs.seconds(0) / costs.seconds(depth), 1) if depth else 1
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
        known = [(k.depth, costs) for k in keys if (costs := self.costs(k)).known(k.depth)]
        return max((self._yield.tokens(d, asked) / costs.seconds(d) for d, costs in known), default=None)

    def choose(self, keys: Sequence[K], depths: Sequence[int], price: float | None = None) -> K:
        """The best of these keys, or a key to be measured.

        depths: the most drafts each row verifies. price: tokens that a second is worth; None: the best key's
        rate. A step with prompt tokens needs a price, the ``rate`` of steps without them: prompt tokens take
        time at any depth, so tokens per second would favour deep steps.
        """
        by_depth, p = {k.depth: k for k in keys}, self.policy
        costs = {d: self.costs(k) for d, k in by_depth.items()}
        if len(by_depth) == 1:
            costs[keys[0].depth].incumbent = keys[0].depth
            return keys[0]
        if self._left and self._probe in by_depth:
            self._left -= 1
            return by_depth[self._probe]
        self._left = 0
        if unknown := [d for d in by_depth if not costs[d].known(d)]:
            return by_depth[self._begin(max(unknown))]
        asked = Counter(depths)
        seconds = {d: costs[d].seconds(d) for d in by_depth}
        tokens = {d: self._yield.tokens(d, asked) for d in by_depth}
        price = price or max(tokens[d] / seconds[d] for d in by_depth)
        loss = {d: seconds[d] - tokens[d] / price for d in by_depth}
        best = min(loss, key=loss.__getitem__)
        # A deeper step may need more pages, and so be of another bucket, which has an incumbent of its own.
        before = min((d for d in by_depth if costs[d].incumbent == d), key=loss.__getitem__, default=best)
        if loss[before] - loss[best] < p.margin * seconds[before]:
            best = before
        costs[best].incumbent = best
        for d in by_depth:
            lost = p.block * max(loss[d] - loss[best], p.margin * seconds[d])
            if d != best and costs[d].waited(d) * p.budget >= lost:
                return by_depth[self._begin(d)]
        return by_depth[best]

    def _begin(self, depth: int) -> int:
        self._probe, self._left = depth, self.policy.block - 1
        return depth
