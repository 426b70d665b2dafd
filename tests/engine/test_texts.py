"""The store of outputs: which texts a request sees, in which order, and how many are kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Progress, Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.texts import GAP, KeptText, TextStore
from mtp_jax.engine.validate import InputProcessor
from mtp_jax.errors import ConfigError
from tests.models import TINY

SAMPLED = SamplingParams(temperature=1, seed=3)


def request(prompt: Sequence[int], output: Sequence[int] = (), salt: str = "", **options: Any) -> Request:
    progress = Progress(output=[*output])
    own = {"other_texts": True, **options}
    return Request(0, (*prompt,), SAMPLED, None, 9, 3, 99, salt=salt, progress=progress, **own)


def seen(texts: TextStore, prompt: Sequence[int], salt: str = "", **options: Any) -> list[list[int]]:
    """The texts of a request's row, the best first."""
    row = texts.row(request(prompt, salt=salt, **options))
    assert row is not None
    assert row.shape == (1, texts.width)
    assert row.dtype == np.int32
    assert row[0, -1] == GAP
    found = [[]]
    for token in row[0, :-1].tolist():
        found = [*found, []] if token == GAP else [*found[:-1], [*found[-1], token]]
    return [text for text in reversed(found) if text]


def test_an_equal_prompt_comes_first_and_then_the_newest():
    texts = TextStore(16)
    texts.add(request([1], [10, 11]))
    texts.add(request([2], [20]))
    texts.add(request([1], [12]))
    texts.add(request([3], [30, 31]))
    assert seen(texts, [1]) == [[12], [10, 11], [30, 31], [20]]
    assert seen(texts, [9]) == [[30, 31], [12], [20], [10, 11]]
    texts.add(request([1], [10, 11]))  # the same again: once, and the newest
    assert seen(texts, [9]) == [[10, 11], [30, 31], [12], [20]]
    texts.add(request([4], [20]))  # the same words as answer of another prompt: seen once
    assert seen(texts, [2]) == [[20], [10, 11], [30, 31], [12]]


def test_only_an_equal_salt_sees_a_text():
    texts = TextStore(16)
    texts.add(request([1], [10], salt="a"))
    texts.add(request([1], [20], salt="b"))
    texts.add(request([1], [30]))
    assert [seen(texts, [1], salt) for salt in ("a", "b", "", "c")] == [[[10]], [[20]], [[30]], []]
    texts.forget()
    assert seen(texts, [1], "a") == []


def test_a_row_that_is_full_has_the_beginning_of_its_last_text():
    texts = TextStore(8)
    texts.add(request([1], range(20, 40)))
    assert seen(texts, [1]) == [[20, 21, 22, 23, 24, 25, 26]]
    texts.add(request([1], [1, 2]))
    assert seen(texts, [1]) == [[1, 2], [20, 21, 22, 23]]
    texts.add(request([1], [3, 4, 5]))
    assert seen(texts, [1]) == [[3, 4, 5], [1, 2]]


def test_the_oldest_texts_are_forgotten():
    texts = TextStore(64, most=3)
    for n in range(5):
        texts.add(request([n % 2], [n], salt="a" if n < 2 else "b"))
    assert len(texts) == 3
    assert seen(texts, [0], "a") == []
    assert seen(texts, [0], "b") == [[4], [2], [3]]


def test_a_row_that_is_full_looks_at_no_further_text(monkeypatch):
    """The engine's thread makes a row for each request that gets a slot; a store has thousands of texts."""
    texts, looked = TextStore(8), list[KeptText]()
    for n in range(50):
        texts.add(request([n], [n, n]))
    all_of = texts._seen
    monkeypatch.setattr(texts, "_seen", lambda r: (looked.append(t) or t for t in all_of(r)))
    assert seen(texts, [9]) == [[9, 9], [49, 49], [48]]
    assert len(looked) == 3


def test_nothing_is_kept_or_seen_where_nothing_is_wanted():
    off, texts = TextStore(0), TextStore(8)
    off.add(request([1], [2]))
    assert off.row(request([1])) is None
    assert len(off) == 0
    texts.add(request([1]))
    texts.add(request([1], [2]))
    assert seen(texts, [1], other_texts=False) == []


def test_a_seed_gives_one_text_whatever_others_said():
    """A sampled token's random numbers depend on where its step begins, unless verification is coupled."""
    config = EngineConfig(suffix_drafts=True, suffix_store=64)

    def sees(params: SamplingParams, **options: Any) -> bool:
        inputs = InputProcessor(TINY, replace(config, **options), 99, None, lambda: 0.0)
        return inputs.requests(1, [1], params, {})[0].other_texts

    assert not sees(SAMPLED)
    assert sees(SAMPLED, verifier="coupled")
    assert sees(replace(SAMPLED, seed=None))
    assert sees(replace(SAMPLED, temperature=0))


def test_a_store_needs_suffix_drafts():
    with pytest.raises(ConfigError, match="suffix_store = 64 with suffix_drafts = False: it is where"):
        EngineConfig(suffix_store=64)
    assert EngineConfig(suffix_drafts=True, suffix_store=64).without_drafts().suffix_store == 0
