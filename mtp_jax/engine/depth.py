"""Adaptive depth: each step runs the executable that promises the most tokens per second.

The controller measures the cost of steps while it serves, and estimates the tokens of a step from accepted
drafts. Depth 0 takes part, so speculation stops where it does not pay. Every depth gives the right tokens: a
wrong choice costs time only. docs/depth.md has the model and the exploration rule.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from mtp_jax.decode.keys import TreeShape
from mtp_jax.engine.depth_policy import PLAIN, DepthPolicy, DepthRow, StepDepths
from mtp_jax.engine.step_costs import Costs, Standing
from mtp_jax.engine.survival import Offered, Survival


class _Key(Protocol):
    """A step's program; ``bucket`` is the same for all ways to do the same work."""

    @property
    def slots(self) -> int: ...
    @property
    def way(self) -> StepDepths: ...
    @property
    def bucket(self) -> object: ...


K = TypeVar("K", bound=_Key)


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
        self._tokens, self._hoped = self._expected(), self._expected(errors=1)

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
        self._tokens, self._hoped = self._expected(), self._expected(errors=1)

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

    def _expected(self, errors: float = 0) -> list[float]:
        """Expected tokens of a row that goes on, at depth 0, 1, 2, ...

        Until it was observed, a draft is as good as the draft before it. errors: number of standard errors
        by which the chance of each draft is taken to be better than its mean.
        """
        p = self._policy
        chains, chance, reach = [1.0], p.prior, 1.0
        for held, tried in zip(self._held.tolist(), self._tried.tolist(), strict=True):
            seen = tried + p.weight
            chance = min((held + p.weight * chance) / seen, 1.0)  # sums that fade are rounded
            reach *= min(chance + errors * math.sqrt(chance * (1 - chance) / (seen + 1)), 1)
            chains.append(chains[-1] + reach)
        walked = self._walked + p.weight * (chains[-1] - 1)
        return chains + [1 + walked / (self._trees + p.weight)] * self._more

    def tokens(self, key: _Key, asked: Mapping[int, int], hoped: bool = False) -> float:
        """Expected tokens of a step. asked: numbers of rows, by most drafts to verify.

        hoped: take each draft's chance as a standard error better than its mean.
        """
        way = depth, verified = key.way
        by_depth = self._hoped if hoped else self._tokens
        due = sum(n * by_depth[min(verified, most)] for most, n in asked.items())
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


@dataclass(frozen=True)
class _Outlook:
    """The ways of a step: seconds, seconds that each loses, and seconds that it loses in the best case.

    In the best case each draft is a standard error likelier than its mean, and costs are lower by the doubt.
    """

    policy: DepthPolicy
    seconds: dict[StepDepths, float]
    loss: dict[StepDepths, float]
    hoped: dict[StepDepths, float]

    def pays(self, way: StepDepths, best: StepDepths, steps: int, earned: float) -> bool:
        """Whether steps of this way instead of the best may lose their seconds, for a hoped gain.

        earned: seconds that they may lose in any case.
        """
        least = self.policy.margin * self.seconds[way]
        lost = max(self.loss[way] - self.loss[best], least)
        gain = max(self.loss[best] - self.hoped[way] - least, 0)
        return steps * lost <= earned + self.policy.horizon * gain


class DepthController:
    """Chooses the executable of every step, from measured costs and acceptance."""

    def __init__(self, most: int, policy: DepthPolicy | None = None, trees: TreeShape | None = None) -> None:
        """most: number of drafts of the deepest step. trees: see ``adaptive_depths``."""
        self.policy = policy = policy or DepthPolicy()
        self.steps = trees and trees.steps
        self._yield = Yield(most, policy, self.steps)
        self._costs: defaultdict[Any, Costs] = defaultdict(lambda: Costs(policy))
        # The current probe: its way, the number of its steps that are left, and seconds that it may lose.
        self._probe, self._left, self._earned = PLAIN, 0, 0.0
        # The way of the last step that was read, and the number of such steps read in a row.
        self._way, self._row = PLAIN, 0
        # Recent seconds: all; those of steps with a cost at depth 0; the same tokens' seconds at depth 0.
        self._took = self._covered = self._plain = 0.0

    def forget(self) -> None:
        """Forget all costs: the next steps measure every way anew."""
        self._costs.clear()
        self._took = self._covered = self._plain = 0.0

    def warm_up(self, keys: Sequence[K]) -> Iterator[K]:
        """Steps of a warm-up: two probes of each key, apart, as a disturbance may hit a whole probe."""
        return (key for key in (*keys, *keys) for _ in range(self.policy.block))

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
            settled = Standing.SERVED if rows else Standing.EMPTY
            costs.add(way, seconds, settled if self._row > self.policy.block // 2 else Standing.FIRST)
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
        by_way = {k.way: k for k in keys}
        costs = {way: self.costs(k) for way, k in by_way.items()}
        if len(by_way) == 1:
            costs[keys[0].way].incumbent = keys[0].way
            return keys[0]
        unknown = [way for way in by_way if not costs[way].known(way)]
        begun = self._left > 0 and self._probe in by_way
        if begun and (unknown or math.isinf(self._earned)):
            return by_way[self._go_on()]
        if unknown:
            return by_way[self._begin(max(unknown), math.inf)]
        outlook = self._outlook(by_way, costs, Counter(depths), price)
        best = self._incumbent(outlook.loss, outlook.seconds, costs)
        if begun and outlook.pays(self._probe, best, self._left, self._earned):
            return by_way[self._go_on()]
        self._left = 0
        # More ways have no more to lose together than the depths would have.
        budget = self.policy.budget * sum(made == verified for made, verified in by_way) / len(by_way)
        for way in sorted(by_way, reverse=True):
            earned = costs[way].waited(way) * budget
            if way != best and outlook.pays(way, best, self.policy.block, earned):
                return by_way[self._begin(way, earned)]
        return by_way[best]

    def _outlook(
        self,
        by_way: Mapping[StepDepths, _Key],
        costs: Mapping[StepDepths, Costs],
        asked: Mapping[int, int],
        price: float | None,
    ) -> "_Outlook":
        seconds = {way: costs[way].seconds(way) for way in by_way}
        tokens = {way: self._yield.tokens(k, asked) for way, k in by_way.items()}
        price = price or max(tokens[way] / seconds[way] for way in by_way)
        loss = {way: seconds[way] - tokens[way] / price for way in by_way}
        hoped = {}
        for way, key in by_way.items():
            least = seconds[way] / (1 if costs[way].served(way) else 1 + self.policy.doubt)
            hoped[way] = least - self._yield.tokens(key, asked, hoped=True) / price
        return _Outlook(self.policy, seconds, loss, hoped)

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

    def _begin(self, way: StepDepths, earned: float) -> StepDepths:
        self._probe, self._left, self._earned = way, self.policy.block, earned
        return self._go_on()

    def _go_on(self) -> StepDepths:
        self._left -= 1
        return self._probe
