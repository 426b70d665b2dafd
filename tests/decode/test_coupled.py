"""Gumbel coupling: the law of one draw, how often two agree, and what a verdict keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mtp_jax.decode import sampling as sm
from mtp_jax.decode import verify as vf
from tests.compiling import AS_FOR_USERS

N = 40_000


def keys(rows: int, position: int = 0) -> jax.Array:
    return sm.row_keys(jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, position), sm.Purpose.SAMPLE)


def law(rng: np.random.Generator, size: int, sharp: float = 1.0) -> np.ndarray:
    p = np.exp(sharp * rng.normal(size=size))
    return (p / p.sum()).astype(np.float32)


draw = jax.jit(sm.gumbel_sample, compiler_options=AS_FOR_USERS)  # many rows


def test_one_draw_has_the_law(rng):
    p = law(rng, 7, 1.5)
    p[3] = 0
    p /= p.sum()
    seen = np.bincount(draw(keys(N), jnp.tile(p, (N, 1))), minlength=7)
    assert seen[3] == 0
    kept = p > 0
    wanted = p[kept].astype(np.float64)
    assert stats.chisquare(seen[kept], wanted / wanted.sum() * N).pvalue > 0.01


def test_many_equal_tokens_are_drawn_alike():
    """Where thousands compete, the winner's noise is far out in its tail: ties there would favour low ids."""
    size = 4096
    drawn = np.asarray(draw(keys(4000), jnp.full((4000, size), 1 / size, jnp.float32)))
    assert stats.kstest((drawn + 0.5) / size, "uniform").pvalue > 0.01


@pytest.mark.parametrize("near", [0.05, 1.0])
def test_draws_agree_as_often_as_they_should(rng, near):
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which is at least (1 - d) / (1 + d)."""
    p = law(rng, 9).astype(np.float64)
    q = p * np.exp(near * rng.normal(size=9))
    q /= q.sum()
    agree = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    distance = np.abs(p - q).sum() / 2
    assert agree >= (1 - distance) / (1 + distance)
    a, b = (draw(keys(N), jnp.tile(x.astype(np.float32), (N, 1))) for x in (p, q))
    assert abs(np.mean(a == b) - agree) < 4 * np.sqrt(agree * (1 - agree) / N)


def test_broken_rows_have_no_token():
    probs = jnp.asarray([[0.5, np.nan, 0.5], [0, 0, 0], [0, 1, 0]], jnp.float32)
    np.testing.assert_array_equal(draw(keys(3), probs), [sm.NO_TOKEN, sm.NO_TOKEN, 1])


def test_the_verdict_keeps_what_the_target_draws(rng):
    rows, depth, vocab = 500, 3, 6
    target = np.stack([[law(rng, vocab) for _ in range(depth + 1)] for _ in range(rows)])
    each = jnp.stack([keys(rows, i) for i in range(depth + 1)], axis=1)
    own = np.asarray(draw(each, target))
    drafts = np.where(rng.random((rows, depth)) < 0.6, own[:, :-1], rng.integers(-1, vocab, (rows, depth)))
    num_drafts = rng.integers(0, depth + 1, rows)
    verdict = vf.coupled(each, jnp.asarray(target), jnp.asarray(drafts, jnp.int32), jnp.asarray(num_drafts))
    accepted = np.asarray(verdict.accepted)
    for row in range(rows):
        count = 0
        while count < num_drafts[row] and drafts[row, count] == own[row, count]:
            count += 1
        assert accepted[row] == count
    np.testing.assert_array_equal(verdict.token, own[np.arange(rows), accepted])
    assert len(np.unique(accepted)) == depth + 1


def two_tokens(position: int) -> tuple[float, float, float, float]:
    """Two siblings, drawn with the target's numbers: (p-values of tokens 1 and 2, rates of the drafts).

    position: of the token behind a sibling: 1. The control's 0 draws it with the numbers of its parent.
    """
    rng = np.random.default_rng(5)  # these laws in any order of the tests
    size, row = 5, np.arange(N)
    laws = np.exp(rng.normal(size=(size + 1, size)))
    laws = (laws / laws.sum(axis=1, keepdims=True)).astype(np.float32)
    p, behind = laws[0], laws[1:]
    q = p * np.exp(0.5 * rng.normal(size=size)).astype(np.float32)
    root, child = keys(N), keys(N, position)
    best = np.asarray(draw(root, jnp.tile(q, (N, 1))))
    rest = np.tile(q, (N, 1))
    rest[row, best] = 0
    drafts = np.stack([best, draw(root, jnp.asarray(rest))], axis=1)
    target = np.stack([np.tile(p, (N, 1)), behind[drafts[:, 0]], behind[drafts[:, 1]]], axis=1)
    count, parents = jnp.full(N, 2), jnp.zeros((N, 2), jnp.int32)
    each = jnp.stack([root, child, child], axis=1)
    verdict = vf.coupled(each, jnp.asarray(target), jnp.asarray(drafts), count, parents)
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
