"""Masks of rules along drafts are those of one token at a time."""

import random

import numpy as np
import pytest

from mtp_jax.text.rules import BadWords, ThinkingBudget, TokenRule, bad_words
from mtp_jax.text.thoughts import Thoughts

V, OPENS, CLOSES = 70, 40, 65
ALL = set(range(V))
WORDS = [[3], [5, 6], [6, 6, 7], [64, 1], [5, 6]]


def narrowed(rule: TokenRule, drafts: list[int], width: int, allowed: set[int] = ALL) -> np.ndarray:
    """What a rule leaves of the same mask at every position."""
    bits = np.zeros(-(-V // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    masks = np.tile(np.packbits(bits, bitorder="little").view(np.uint32), (width, 1))
    rule.narrow(masks, drafts)
    return masks


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:V]).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_word_is_never_completed(seed):
    draw = random.Random(seed)
    rule, text = BadWords(WORDS), []
    for _ in range(40):
        drafts = [draw.choice([1, 5, 6, 7, 64]) for _ in range(draw.randrange(4))]
        masks = narrowed(rule, drafts, 5)
        for i in range(5):
            known = [*text, *drafts[:i]]
            ends = {w[-1] for w in WORDS if known[len(known) - len(w) + 1 :] == w[:-1] or len(w) == 1}
            wanted = set(range(V)) - (ends if i <= len(drafts) else set())
            assert tokens_of(masks[i]) == wanted
        taken = [*drafts[: draw.randrange(len(drafts) + 1)], draw.choice([5, 6, 64])]
        rule.advance(taken)
        text += taken


TAGS = {OPENS: "<think>", CLOSES: "</think>"}


def budget(most: int, inside: bool, may_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(most, CLOSES, Thoughts(may_open), inside, lambda token: TAGS.get(token, "x"))


def allowance(text: list[int], most: int, thinking: bool) -> int | None:
    """Tokens that the thought may still have; None outside. Only the first can be one."""
    inside = [t for t in text if thinking or text[0] == OPENS]
    if not (thinking or inside) or CLOSES in inside:
        return None
    return most - len(inside) + (not thinking)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_thought_ends_at_its_budget(most, thinking):
    draw, ended = random.Random(most), 0
    for _ in range(30):
        rule, text = budget(most, thinking), list[int]()
        for _ in range(6):
            drafts = [draw.choice([1, 2, 3, OPENS, CLOSES]) for _ in range(3)]
            masks = narrowed(rule, drafts, 4)
            for i, draft in enumerate([*drafts, 1]):
                end = allowance([*text, *drafts[:i]], most, thinking) == 0
                assert tokens_of(masks[i]) == ({CLOSES} if end else set(range(V)))
                if end and draft != CLOSES:
                    break  # never kept, nor what follows
            end = allowance(text, most, thinking) == 0
            token = CLOSES if end else draw.choice([1, OPENS])
            ended += end
            rule.advance([token])
            text.append(token)
    assert ended > 3


def test_before_there_are_drafts_the_end_is_foreseen():
    masks = narrowed(budget(2, True, may_open=False), [], 5)
    assert [tokens_of(m) == {CLOSES} for m in masks] == [False, False, True, False, False]


def test_the_end_of_a_thought_waits_until_a_grammar_allows_it():
    rule = budget(2, True)
    rule.advance([1, 2])
    in_call = narrowed(rule, [], 1, {5, 6})
    assert tokens_of(in_call[0]) == {5, 6}
    rule.advance([5, 6, 5])
    assert tokens_of(narrowed(rule, [], 1)[0]) == {CLOSES}


def test_a_step_looks_at_no_sequence(monkeypatch):
    """However many and long they are: only states of the automaton are read, as many as there are drafts."""
    rule = BadWords([[7] * 1000 + [i % V] for i in range(32)])
    rule.advance([7] * 5000)
    read = []

    class Counted(dict):
        def get(self, key, default=None):
            read.append(key)
            return super().get(key, default)

    for name in ("_next", "_last"):
        monkeypatch.setattr(rule, name, Counted(getattr(rule, name)))
    masks = narrowed(rule, [7, 7, 7], 4)
    assert tokens_of(masks[3]) == ALL - set(range(32))
    assert len(read) < 30


def test_words_are_spelt_at_the_beginning_and_after_a_space():
    ids = {"cat": [1, 2], " cat": [9, 2], "dog": [3], " dog": [8, 3], "x": [4], " x": [7], "": [], " ": [6]}
    assert bad_words(["cat", " dog", "x"], ids.__getitem__) == [[1, 2], [9, 2], [3], [4], [7]]
