"""Worlds whose rows are not alike: how much verification of the likeliest drafts gains.

A row's draft at position i is accepted with chance p_i once those before it are. Its drafter shows a margin
from which the logit of p_i is known up to noise. A step takes 1 second, a share of it for every row that goes
through the trunk, and a share for every draft that is made. The baseline is the best uniform depth, known in
hindsight only; the controller finds its way, its estimate and all costs while it runs.

``python -m tests.engine.mixed_rows`` prints the table of docs/depth.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import mean

import numpy as np

from mtp_jax.decode.keys import Origin
from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.depth_policy import StepDepths, adaptive_depths
from mtp_jax.engine.survival import Offered
from mtp_jax.simulate.ranking import likeliest
from tests.engine.worlds import Key

MOST = 7
DEPTHS = adaptive_depths(MOST)
KINDS: Mapping[str, list[tuple[float, float]]] = {
    "mixed": [(0.95, 0.4), (0.6, 0.3), (0.2, 0.3)],
    "two": [(0.97, 0.5), (0.3, 0.5)],
    "alike": [(0.8, 1.0)],
    "poor": [(0.1, 1.0)],
}
"""Chances of a draft, and the share of rows that each is for."""


@dataclass(frozen=True)
class Mixed:
    """A world.

    Attributes:
        kinds: name in ``KINDS``.
        rows: rows that run together.
        row: seconds of a row through the trunk.
        draft: seconds of a draft, for all rows.
        noise: standard deviation of the margin, as the logit of a chance.
        spread: standard deviation of the logit within a kind.
        steps: length of a run.
        jitter: standard deviation of the logarithm of seconds.
    """

    kinds: str
    rows: int
    row: float
    draft: float = 0.0
    noise: float = 1.0
    spread: float = 1.2
    steps: int = 1500
    jitter: float = 0.08

    def luck(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Margins [steps, rows, K], how many first drafts are right [steps, rows], and jitter [steps]."""
        rng, shape = np.random.default_rng(seed), (self.steps, self.rows, MOST)
        chances, shares = zip(*KINDS[self.kinds], strict=True)
        base = rng.choice(chances, size=shape[:2], p=shares)
        logit = np.log(base / (1 - base))[..., None] + rng.normal(0, self.spread, shape)
        logit -= 0.15 * np.arange(MOST)  # later drafts are worse
        right = np.logical_and.accumulate(rng.random(shape) < 1 / (1 + np.exp(-logit)), axis=2).sum(axis=2)
        jitter = np.exp(rng.normal(0, self.jitter, self.steps))
        return logit + rng.normal(0, self.noise, shape), right, jitter

    def seconds(self, way: StepDepths) -> float:
        """Seconds of a step."""
        made, verified = way
        return 1 + self.draft * made + self.row * self.rows * (1 + verified)


@cache
def best_uniform(world: Mixed, seed: int) -> float:
    """Tokens per second of the best depth that all rows have in all steps."""
    _, right, jitter = world.luck(seed)
    kept = {d: world.rows + np.minimum(right, d).sum() / world.steps for d in DEPTHS}
    return max(kept[d] / (world.seconds((d, d)) * jitter.mean()) for d in DEPTHS)


def over_best_uniform(world: Mixed, seed: int, ranked: bool = True) -> tuple[float, float]:
    """Tokens per second over ``best_uniform``'s, and rows through the trunk per step.

    ranked: whether steps may verify the likeliest drafts only.
    """
    margins, right, jitter = world.luck(seed)
    controller, rng = DepthController(MOST), np.random.default_rng(seed)
    keys = [Key(world.rows, d) for d in DEPTHS]
    keys += [Key(world.rows, MOST, kept=d) for d in DEPTHS[1:-1] if ranked]
    for key in controller.warm_up(keys):  # over empty slots
        seconds = world.seconds(key.way) * math.exp(rng.normal(0, world.jitter))
        controller.learn(key, seconds, [], [])
    tokens = spent = through = 0.0
    caps = [MOST] * world.rows
    for shown, correct, slow in zip(margins, right, jitter, strict=True):
        key = controller.choose(keys, caps)
        made, verified = key.way
        counts = np.full(world.rows, made)
        if made != verified:
            most = np.array(caps)
            counts = likeliest(shown, most, controller.estimate[Origin.NEXTN], verified * world.rows)
        accepted, seconds = np.minimum(correct, counts), world.seconds(key.way) * slow
        tokens, spent = tokens + world.rows + accepted.sum(), spent + seconds
        through += world.rows * (1 + verified)
        offered = Offered(np.zeros(world.rows, np.int32), shown[:, :made], counts, accepted)
        rows = [*zip(counts.tolist(), accepted.tolist(), (accepted + 1).tolist(), strict=True)]
        controller.learn(key, seconds, caps, rows, offered if made else None)
    return tokens / spent / best_uniform(world, seed), through / world.steps


def worlds(kinds: str, draft: float = 0.0) -> list[Mixed]:
    """The worlds of some kinds of rows: few and many, and rows that cost little and much."""
    return [Mixed(kinds, rows, row, draft) for rows in (8, 32, 64) for row in (0.005, 0.02, 0.1)]


def _print_table() -> None:
    print(
        "| rows | kinds | seconds of a draft | mean of 9 worlds | worst |\n| --- | --- | ---: | ---: | ---: |"
    )
    for draft in (0.0, 0.03):
        for kinds in KINDS:
            found = [mean(over_best_uniform(w, seed)[0] for seed in range(2)) for w in worlds(kinds, draft)]
            print(f"| 8, 32, 64 | {kinds} | {draft:g} | {mean(found):.3f} | {min(found):.3f} |", flush=True)


if __name__ == "__main__":
    _print_table()
