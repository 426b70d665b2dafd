"""Tens of thousands of launches of random histories: text, drafts and pages are right after each."""

import math
from collections import Counter

import pytest

from mtp_jax.text.grammar import Grammars
from tests.simulate.histories import HISTORIES, LAUNCHES, History

EVERYTHING = (
    *("preempted", "hits", "restored", "moved", "aborted", "late", "weights", "structured"),
    *("stop", "length", "error", "experts"),
)
FIRST = 24


@pytest.mark.parametrize(
    "seeds",
    [range(FIRST), pytest.param(range(FIRST, HISTORIES), marks=pytest.mark.rest)],
    ids=["first", "rest"],
)
def test_text_drafts_and_pages_are_right_whatever_happens(seeds: range, grammars: Grammars):
    """A failure names the seed: ``History(seed, grammars).run(LAUNCHES)``."""
    seen: Counter[str] = Counter()
    counts: dict[float, list[int]] = {}
    for seed in seeds:
        history = History(seed, grammars)
        try:
            history.run(LAUNCHES)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r:.500}") from error
        seen += history.seen
        for rate, kept, offered in zip(history.language.rates, history.kept, history.offered, strict=True):
            total = counts.setdefault(rate, [0, 0])
            total[0] += kept
            total[1] += offered
    assert seen["launches"] >= len(seeds) * LAUNCHES
    assert all(seen[name] > len(seeds) / 3 for name in EVERYTHING), seen
    assert seen["structured drafts kept"] > 2 * len(seeds)
    for rate, (kept, offered) in counts.items():
        assert offered > 20 * len(seeds)
        assert abs(kept / offered - rate) <= 4 * math.sqrt(rate * (1 - rate) / offered), (rate, kept, offered)
