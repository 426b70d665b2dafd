"""Masks of rules along drafts are those of one token at a time."""

import random

import numpy as np
import pytest

from mtp_jax.text.rules import BadWords, ThinkingBudget, bad_words

V, OPENS, CLOSES = 70, 40, 65
WORDS = [[3], [5, 6], [6, 6, 7], [64, 1], [5, 6]]


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:V]).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_word_is_never_completed(seed):
    draw = random.Random(seed)
    rule, text = BadWords(WORDS, V), []
    for _ in range(40):
        drafts = [draw.choice([1, 5, 6, 7, 64]) for _ in range(draw.randrange(4))]
        masks = rule.masks(drafts, 5)
        for i in range(5):
            known = [*text, *drafts[:i]]
            ends = {w[-1] for w in WORDS if known[len(known) - len(w) + 1 :] == w[:-1] or len(w) == 1}
            wanted = set(range(V)) - (ends if i <= len(drafts) else set())
            assert tokens_of(masks[i]) == wanted
        taken = [*drafts[: draw.randrange(len(drafts) + 1)], draw.choice([5, 6, 64])]
        rule.advance(taken)
        text += taken


def after(left: int | None, token: int, most: int) -> int | None:
    """Tokens that the thought may still have."""
    if token == CLOSES:
        return None
    if left is None:
        return most if token == OPENS else None
    return left - 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_thought_ends_at_its_budget(most, thinking):
    draw = random.Random(most)
    rule, left = ThinkingBudget(most, OPENS, CLOSES, thinking, V), most if thinking else None
    ended = 0
    for _ in range(60):
        drafts = [draw.choice([1, 2, 3, OPENS, CLOSES]) for _ in range(3)]
        masks, at = rule.masks(drafts, 4), left
        for i, draft in enumerate([*drafts, 1]):
            assert tokens_of(masks[i]) == ({CLOSES} if at == 0 else set(range(V)))
            if at == 0 and draft != CLOSES:
                break  # never kept, nor what follows
            at = after(at, draft, most)
        token = CLOSES if left == 0 else draw.choice([1, OPENS])
        ended += token == CLOSES
        rule.advance([token])
        left = after(left, token, most)
    assert ended > 3


def test_before_there_are_drafts_the_end_is_foreseen():
    masks = ThinkingBudget(2, None, CLOSES, True, V).masks([], 5)
    assert [tokens_of(m) == {CLOSES} for m in masks] == [False, False, True, False, False]


def test_words_are_spelt_at_the_beginning_and_after_a_space():
    ids = {"cat": [1, 2], " cat": [9, 2], "dog": [3], " dog": [8, 3], "x": [4], " x": [7], "": [], " ": [6]}
    assert bad_words(["cat", " dog", "x"], ids.__getitem__) == [[1, 2], [9, 2], [3], [4], [7]]
