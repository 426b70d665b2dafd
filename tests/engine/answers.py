"""First answers of an engine that has just been warmed up, in virtual time: seeded, no clock, no device.

Adaptive depth knows nothing of the drafts yet, and may have measured a depth wrongly. Steps count with their
mean seconds and their expected tokens, so that the law is judged, and not the luck of an answer; the
controller sees both with noise, and each step one launch late.

``python -m tests.engine.answers`` prints the tables of docs/depth.md.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from statistics import mean

from mtp_jax.engine.depth import DepthController
from tests.engine.worlds import Key

TOKENS, MOST = 128, 3
Seconds = dict[int, float]

MACHINES: dict[str, Seconds] = {
    "bfloat16, AVX2": {0: 1, 1: 2.07, 3: 3.0},
    "FP8, AVX2": {0: 1, 1: 2.07, 3: 2.93},
    "float32, AVX2": {0: 1, 1: 1.9, 3: 2.78},
    "windows at half": {0: 1, 1: 1.5, 3: 2.2},
    "demo model": {0: 1, 1: 1.35, 3: 1.8},
    "windows nearly free": {0: 1, 1: 1.1, 3: 1.25},
    "a window costs its rows": {0: 1, 1: 2.0, 3: 4.0},
}
"""Seconds of a step by depth. The formats are of a model of 68 M parameters on two cores without AVX-512."""

DRAFTS: dict[str, Sequence[float]] = {
    "all": (1, 1, 1),
    "0.9": (0.9, 0.9, 0.9),
    "0.85, 0.75, 0.65": (0.85, 0.75, 0.65),
    "0.7": (0.7, 0.7, 0.7),
    "0.45, 0.4, 0.3": (0.45, 0.4, 0.3),
    "0.1": (0.1, 0.1, 0.1),
    "none": (0, 0, 0),
}
"""Chances of a draft by position, once the drafts before it were accepted."""


@dataclass(frozen=True)
class Mistake:
    """Warm-up's measurements that say little of steps with requests.

    Attributes:
        calls: whether the first call of each depth takes 2 to 5 times as long.
        probe: whether the first whole probe of one depth does.
        shallow: whether a depth takes half as long over empty slots as it takes with requests.
        serving: seconds of all steps with requests over their seconds in warm-up.
    """

    calls: bool = False
    probe: bool = False
    shallow: bool = False
    serving: float = 1.0


MISTAKES = {
    "right": Mistake(),
    "first calls 2 to 5 times as long": Mistake(calls=True),
    "a probe 2 to 5 times as long": Mistake(probe=True),
    "a depth half as long over empty slots": Mistake(shallow=True),
    "all steps 1.3 times as long with requests": Mistake(serving=1.3),
}


def tokens(depth: int, chances: Sequence[float]) -> float:
    """Expected tokens of a row's step."""
    return 1 + sum(accumulate(chances[:depth], mul))


class Engine:
    """A controller that is warmed up, and then answers."""

    def __init__(
        self,
        batches: dict[int, Seconds],
        mistake: Mistake,
        seed: int,
        make: Callable[[], DepthController],
    ) -> None:
        """batches: seconds of a step by depth, by slots."""
        self.batches, self.mistake, self.rng = batches, mistake, random.Random(seed)
        self.controller = make()
        self.keys = {slots: [Key(slots, depth) for depth in costs] for slots, costs in batches.items()}
        for slots in batches:
            self._warm_up(slots)

    def _noise(self) -> float:
        hiccup = (self.rng.random() < 0.02) * self.rng.expovariate(1)
        return math.exp(self.rng.gauss(0, 0.08)) * (1 + hiccup)

    def _warm_up(self, slots: int) -> None:
        mistake, costs = self.mistake, self.batches[slots]
        wrong = self.rng.choice(list(costs))
        factor = math.exp(self.rng.uniform(math.log(2), math.log(5)))
        typical = {depth: s * math.exp(self.rng.gauss(0, 0.1)) for depth, s in costs.items()}
        ran = dict.fromkeys(costs, 0)
        for key in self.controller.warm_up(self.keys[slots]):
            seconds = typical[key.depth] * self._noise()
            first = ran[key.depth] < self.controller.policy.block
            if (mistake.calls and not ran[key.depth]) or (mistake.probe and first and key.depth == wrong):
                seconds *= factor
            if mistake.shallow and key.depth == wrong:
                seconds /= 2
            self.controller.learn(key, seconds, [], [])
            ran[key.depth] += 1

    def answer(self, chances: Sequence[float], slots: int = 1) -> float:
        """Tokens per second over the best fixed depth's, of an answer of 128 tokens by each slot."""
        costs, made, took = self.batches[slots], 0.0, 0.0
        unread = None
        while made < TOKENS:
            key = self.controller.choose(self.keys[slots], [MOST] * slots)
            if unread:
                self.controller.learn(*unread)
            rows = []
            for _ in range(slots):
                right = next((i for i in range(key.depth) if self.rng.random() >= chances[i]), key.depth)
                rows.append((key.depth, right, right + 1))
            seconds = costs[key.depth] * self.mistake.serving
            unread = key, seconds * self._noise(), [MOST] * slots, rows
            made, took = made + tokens(key.depth, chances), took + costs[key.depth]
        assert unread
        self.controller.learn(*unread)
        return made / took / max(tokens(depth, chances) / costs[depth] for depth in costs)


adaptive = partial(DepthController, MOST)


def first_answers(
    costs: Seconds,
    chances: Sequence[float],
    mistake: Mistake,
    seeds: Sequence[int] = range(24),
    make: Callable[[], DepthController] = adaptive,
) -> list[float]:
    """The first answer's share of the best fixed depth's tokens per second, by seed."""
    return [Engine({1: costs}, mistake, seed, make).answer(chances) for seed in seeds]


def anything(seed: int) -> tuple[Seconds, Sequence[float]]:
    """A random machine, whose windows cost from nearly nothing to nearly their rows, and random chances."""
    rng = random.Random(seed)
    share, power = math.exp(rng.uniform(math.log(0.03), math.log(1.1))), rng.uniform(0.7, 1)
    chance, falls = rng.random(), rng.uniform(0.7, 1)
    return {d: 1 + share * d**power for d in (0, 1, 3)}, [chance * falls**i for i in range(MOST)]


def _print_tables() -> None:
    drafts = " | ".join(DRAFTS)
    print(f"| drafts accepted | {drafts} |\n| --- |{' ---: |' * len(DRAFTS)}")
    for name, costs in MACHINES.items():
        found = [first_answers(costs, c, MISTAKES["a probe 2 to 5 times as long"]) for c in DRAFTS.values()]
        print(f"| {name} | {' | '.join(f'{mean(f):.3f}' for f in found)} |", flush=True)
    print("\n| warm-up | mean | worst profile | a tenth of answers below |\n| --- | ---: | ---: | ---: |")
    for name, mistake in MISTAKES.items():
        found = [first_answers(m, c, mistake) for m in MACHINES.values() for c in DRAFTS.values()]
        every = sorted(ratio for profile in found for ratio in profile)
        tenth = every[len(every) // 10]
        print(f"| {name} | {mean(every):.3f} | {min(map(mean, found)):.3f} | {tenth:.3f} |", flush=True)


if __name__ == "__main__":
    _print_tables()
