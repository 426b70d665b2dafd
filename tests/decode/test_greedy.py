"""The best tokens, found in parts of the vocabulary, are those of all logits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.bookkeeping import abstract_state, empty_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.greedy import best_tokens
from mtp_jax.decode.keys import ACCEPTED, SamplingMode, StepKey
from mtp_jax.decode.sampling import argmax
from mtp_jax.decode.state import StateShape
from mtp_jax.decode.step import Step
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.products.cpu import CpuProducts
from mtp_jax.model.products.plain import Products
from mtp_jax.model.sharding import make_mesh
from mtp_jax.model.trunk import Model
from tests.models import TINY, rigged


def found(hidden: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, ...]:
    """The logits, the best tokens of their parts, and whether each row is finite."""

    def run(hidden: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:  # parts are no part of jit's key
        return xla().products.head(hidden, table), *best_tokens(hidden, table, xla())

    return tuple(map(np.asarray, jax.jit(run)(hidden, table)))


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_do_not_show(rng, monkeypatch, parts):
    """Small integers: many logits are equal, within a part and across parts."""
    table = rng.integers(-2, 3, size=(40, 3)).astype(np.float32)
    hidden = rng.integers(-2, 3, size=(2, 50, 3)).astype(np.float32)
    monkeypatch.setattr(Products, "head_parts", lambda *_: parts)
    logits, ids, finite = found(hidden, table)
    assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 1).any()
    np.testing.assert_array_equal(ids, jax.jit(argmax)(logits))
    assert finite.all()


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (35, 1), (36, 4), (512, 4)])
def test_logits_of_few_rows_are_not_cut(rows, parts):
    """The logits of 35 rows, in float32, are 0.98 % of the bytes of DeepSeek-V3's table in bfloat16."""
    hidden = jnp.zeros((rows, 1, 7168), jnp.bfloat16)
    assert xla().products.head_parts(hidden) == parts
    assert xla(make_mesh(1, 2)).products.head_parts(hidden) == 1  # devices share the logits


@pytest.mark.parametrize("row", [0, 15, 39])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_is_noticed_in_every_part(row, broken):
    table = np.ones((40, 3), np.float32)
    table[row] = broken
    _, ids, finite = found(np.ones((5, 3), np.float32), table)
    assert not finite.any()
    assert ((ids >= 0) & (ids < 40)).all()


CFG = replace(TINY, num_hidden_layers=1)
DRAFTER = build(CFG)


@pytest.mark.rest
def test_steps_are_the_same(rng, monkeypatch):
    params, model, slots, depth, window = rigged(CFG, noise=0.1), Model(CFG, xla_cpu()), 8, 3, 3
    tokens = rng.integers(2, TINY.vocab_size, (slots, window)).astype(np.int32)

    def run() -> np.ndarray:
        state = empty_state(abstract_state(model, DRAFTER, StateShape(slots, slots, 16, 1)))
        each, words = np.arange(slots, dtype=np.int32), -(-TINY.vocab_size // 32)
        none = np.zeros_like(each)
        rows = replace(state.slots, page_table=each[:, None], remaining=none + 100, depth=none + depth)
        state = replace(state, slots=rows)
        chunk = Chunk(
            each,
            none,
            none + window,
            none == 0,
            tokens,
            np.full_like(tokens, -1),
            none - 1,
            np.full((slots, words), 2**32 - 1, np.uint32),
        )
        keys = StepKey(0, 0, 1, SamplingMode()), StepKey(slots, depth, 1, SamplingMode())
        # Functions of their own: the number of parts is no part of what jit keeps a program by.
        begin, step = (jax.jit(partial(Step(Decoding(model, DRAFTER), key))) for key in keys)
        state, _ = begin(params, state, chunk)
        results = []
        for _ in range(3):
            state, result = step(params, state)
            results.append(np.asarray(result.packed))
        return np.stack(results)

    whole = run()
    monkeypatch.setattr(CpuProducts, "head_parts", lambda *_: 3)
    np.testing.assert_array_equal(run(), whole)
    assert whole[:, :, depth + 1 + ACCEPTED].sum() > 0
