"""Which data shard a request goes to: rows and pages lie evenly, and what is cached is still found."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import pytest

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.shards import Shard, preferred

EMPTY = Shard(0, 0, 100)


def test_the_longest_hit_decides_then_what_is_on_the_device():
    assert preferred([EMPTY, replace(EMPTY, found=2), replace(EMPTY, found=5)], 8) == [2, 1, 0]
    assert preferred([replace(EMPTY, found=5, restored=5), replace(EMPTY, found=5, restored=1)], 8) == [1, 0]


def test_without_a_hit_the_least_loaded_shard_is_the_best():
    assert preferred([Shard(3, 30, 70), Shard(1, 40, 60), Shard(2, 20, 80)], 10) == [2, 1, 0]
    assert preferred([Shard(2, 20, 40), Shard(2, 20, 80)], 10) == [1, 0]  # the one with more free pages
    assert preferred([EMPTY] * 4, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "first"), [(1, 0), (2, 0), (3, 1), (9, 1)])
def test_a_hit_does_not_draw_requests_to_a_full_shard(rows, first):
    """The other one has a row less, or more of them less."""
    full = Shard(rows, rows * 10, 100, found=9)
    other = Shard(1 if rows > 1 else 0, 10 if rows > 1 else 0, 100)
    assert preferred([full, other], 10)[0] == first


def test_long_requests_make_a_shard_full_as_many_do():
    few_long, many_short = Shard(2, 900, 100, found=9), Shard(3, 30, 970)
    assert preferred([few_long, many_short], 10) == [1, 0]
    assert preferred([replace(few_long, pages=40), many_short], 10) == [0, 1]


def test_shards_that_are_all_too_full_come_by_load():
    """One has the rows, the other the pages."""
    assert preferred([Shard(30, 30, 9, found=3), Shard(2, 600, 9)], 1) == [0, 1]
    assert preferred([Shard(30, 30, 9, found=3), Shard(5, 60, 9)], 1) == [1, 0]


# A simulated load


CONFIG = EngineConfig(
    num_speculative_tokens=3, max_num_seqs=64, max_model_len=2048, page_size=16, num_pages=1000
)
SHARDS, TURNS = 4, 600


class HitsAlone(Scheduler):
    """Where most is cached, then the lowest slot, however full the shard is."""

    def order(self, request: Request, cached: Sequence[Sequence[int | None]]) -> list[int]:
        free = self._lowest_free()

        def rank(shard: int) -> tuple[int, int, int]:
            found = cached[shard]
            return -len(found), found.count(None), free.get(shard, 0) % self.slots_per_shard

        return sorted(range(self.shards), key=rank)


@dataclass
class Found:
    """What a run gave: the fullest shard over the mean, averaged over turns; and tokens of prompts.

    Attributes:
        rows: of requests with a slot.
        pages: of what they read.
        hits: tokens that the prefix cache had, over all.
    """

    rows: float
    pages: float
    hits: float


def simulate(kind: type[Scheduler], seed: int) -> Found:
    """Prompts that begin with one of twelve texts, some far more popular, and end differently."""
    rng, numbers = random.Random(seed), itertools.count()
    texts = [[rng.randrange(1000) for _ in range(rng.randrange(32, 400))] for _ in range(12)]
    popular = [1 / (i + 1) for i in range(len(texts))]
    scheduler = kind(CONFIG, SHARDS)
    rows, pages, asked, hit = [], [], 0, 0
    for _ in range(TURNS):
        for _ in range(rng.randrange(3)):
            own = [rng.randrange(1000) for _ in range(int(rng.lognormvariate(4, 1)) % 600 + 1)]
            prompt = (*rng.choices(texts, popular)[0], *own)
            most = rng.randrange(20, 200)
            end = len(prompt) + most
            scheduler.enqueue(Request(next(numbers), prompt, SamplingParams(), 0, most, 3, end))
        for r in scheduler.admit():
            asked, hit = asked + len(r.prompt), hit + r.residence.prefilled
            scheduler.prefilled([r], len(r.prompt))
            r.progress.rows_bound = len(r.prompt) + 1
        scheduler.grow(scheduler.running(), 3)
        for r in [r for r in scheduler.slots if r]:
            scheduler.committed(r, len(r.prompt))
            r.progress.output += [7] * min(3, r.max_tokens - len(r.progress.output))
            r.progress.rows_bound = len(r.prompt) + len(r.progress.output)
            if len(r.progress.output) == r.max_tokens:
                scheduler.release(r)
        by_shard = [scheduler._in_shard(i) for i in range(SHARDS)]
        if sum(map(len, by_shard)) >= 2 * SHARDS:
            rows.append([len(some) for some in by_shard])
            pages.append([sum(len(r.residence.pages) for r in some) for some in by_shard])
    return Found(_over_mean(rows), _over_mean(pages), hit / asked)


def _over_mean(turns: list[list[int]]) -> float:
    return mean(max(by_shard) / mean(by_shard) for by_shard in turns)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2))])
def test_shards_are_evenly_full_and_prefixes_are_still_found(seed):
    before, now = simulate(HitsAlone, seed), simulate(Scheduler, seed)
    assert now.rows - 1 < 0.5 * (before.rows - 1)
    assert now.pages - 1 < 0.5 * (before.pages - 1)
    assert now.rows < 1.2
    assert now.pages < 1.2
    assert now.hits > 0.95 * before.hits > 0.3


if __name__ == "__main__":
    for seed in range(5):
        print(simulate(HitsAlone, seed), simulate(Scheduler, seed))
