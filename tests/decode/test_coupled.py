"""Gumbel coupling: the law of one draw, how often two agree, and what a verdict keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mtp_jax.decode import sampling as sm
from mtp_jax.decode import verify as vf
from tests.compiling import AS_FOR_USERS

N, SIZE = 40_000, 9  # rows and tokens of most tests, which share a program


@functools.partial(jax.jit, static_argnums=0)
def keys(rows: int, position: int | jax.Array = 0) -> jax.Array:
    return sm.row_keys(jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, position), sm.Purpose.SAMPLE)


def law(rng: np.random.Generator, size: int, sharp: float = 1.0) -> np.ndarray:
    p = np.exp(sharp * rng.normal(size=size))
    return (p / p.sum()).astype(np.float32)


draw = jax.jit(sm.gumbel_sample, compiler_options=AS_FOR_USERS)  # many rows
coupled = jax.jit(vf.coupled)


def drawn(position: int, p: np.ndarray) -> np.ndarray:
    """A token of the law [SIZE] for each of N rows."""
    return np.asarray(draw(keys(N, position), np.tile(p.astype(np.float32), (N, 1))))


def test_one_draw_has_the_law(rng):
    p = law(rng, SIZE, 1.5)
    p[3] = 0
    p /= p.sum()
    seen = np.bincount(drawn(0, p), minlength=SIZE)
    assert seen[3] == 0
    kept = p > 0
    wanted = p[kept].astype(np.float64)
    assert stats.chisquare(seen[kept], wanted / wanted.sum() * N).pvalue > 0.01


@pytest.mark.rest
def test_many_equal_tokens_are_drawn_alike():
    """Where thousands compete, the winner's noise is far out in its tail: ties there would favour low ids."""
    size, rows = 4096, 2000
    tokens = np.asarray(draw(keys(rows), np.full((rows, size), 1 / size, np.float32)))
    assert stats.kstest((tokens + 0.5) / size, "uniform").pvalue > 0.01


@pytest.mark.parametrize("near", [0.05, 1.0])
def test_draws_agree_as_often_as_they_should(rng, near):
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which is at least (1 - d) / (1 + d)."""
    p = law(rng, SIZE).astype(np.float64)
    q = p * np.exp(near * rng.normal(size=SIZE))
    q /= q.sum()
    agree = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    distance = np.abs(p - q).sum() / 2
    assert agree >= (1 - distance) / (1 + distance)
    assert abs(np.mean(drawn(0, p) == drawn(0, q)) - agree) < 4 * np.sqrt(agree * (1 - agree) / N)


def test_broken_rows_have_no_token():
    probs = np.array([[0.5, np.nan, 0.5], [0, 0, 0], [0, 1, 0]], np.float32)
    np.testing.assert_array_equal(jax.jit(sm.gumbel_sample)(keys(3), probs), [sm.NO_TOKEN, sm.NO_TOKEN, 1])


def test_the_verdict_keeps_what_the_target_draws(rng):
    rows, depth, vocab = 500, 3, 6
    target = np.stack([[law(rng, vocab) for _ in range(depth + 1)] for _ in range(rows)])
    each = several([keys(rows, i) for i in range(depth + 1)])
    own = np.asarray(jax.jit(sm.gumbel_sample)(each, target))
    drafts = np.where(rng.random((rows, depth)) < 0.6, own[:, :-1], rng.integers(-1, vocab, (rows, depth)))
    num_drafts = rng.integers(0, depth + 1, rows)
    verdict = coupled(each, target, drafts.astype(np.int32), num_drafts)
    accepted = np.asarray(verdict.accepted)
    for row in range(rows):
        count = 0
        while count < num_drafts[row] and drafts[row, count] == own[row, count]:
            count += 1
        assert accepted[row] == count
    np.testing.assert_array_equal(verdict.token, own[np.arange(rows), accepted])
    assert len(np.unique(accepted)) == depth + 1


@jax.jit
def several(each: list[jax.Array]) -> jax.Array:
    return jnp.stack(each, axis=1)


def two_tokens(position: int) -> tuple[float, float, float, float]:
    """Two siblings, drawn with the target's numbers: (p-values of tokens 1 and 2, rates of the drafts).

    position: of the token behind a sibling: 1. The control's 0 draws it with the numbers of its parent.
    """
    rng = np.random.default_rng(5)  # these laws in any order of the tests
    size, row = SIZE, np.arange(N)
    laws = np.exp(rng.normal(size=(size + 1, size)))
    laws = (laws / laws.sum(axis=1, keepdims=True)).astype(np.float32)
    p, behind = laws[0], laws[1:]
    q = p * np.exp(0.5 * rng.normal(size=size)).astype(np.float32)
    root, child = keys(N), keys(N, position)
    best = drawn(0, q)
    rest = np.tile(q, (N, 1))
    rest[row, best] = 0
    drafts = np.stack([best, draw(root, rest)], axis=1)
    target = np.stack([np.tile(p, (N, 1)), behind[drafts[:, 0]], behind[drafts[:, 1]]], axis=1)
    count, parents = np.full(N, 2), np.zeros((N, 2), np.int32)
    verdict = coupled(several([root, child, child]), target, drafts, count, parents)
    assert verdict.path is not None
    kept, node, token = (np.asarray(a) for a in (verdict.accepted > 0, verdict.path[:, 1], verdict.token))
    first = np.where(kept, drafts[row, np.maximum(node - 1, 0)], token)
    seen = np.zeros((size, size))
    np.add.at(seen, (first[kept], token[kept]), 1)
    wanted = seen.sum(1, keepdims=True) * behind
    wanted *= seen.sum() / wanted.sum()
    one = stats.chisquare(
        np.bincount(first, minlength=size), p.astype(np.float64) / p.sum(dtype=np.float64) * N
    )
    two = stats.chisquare(seen.reshape(-1), wanted.reshape(-1), ddof=size - 1)
    return one.pvalue, two.pvalue, np.mean(kept & (node == 1)), np.mean(kept & (node == 2))


def test_trees_have_the_law_of_the_target():
    one, two, first, second = two_tokens(1)
    assert min(one, two) > 0.01
    assert first > 0.5
    assert second > 0.05


def test_a_tree_that_draws_twice_with_one_number_would_show():
    one, two, *_ = two_tokens(0)
    assert one > 0.01
    assert two < 1e-9
