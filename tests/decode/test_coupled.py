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
RNG = np.random.default_rng(0)


def keys(rows: int, position: int = 0) -> jax.Array:
    return sm.row_keys(jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, position), sm.Purpose.SAMPLE)


def law(size: int, sharp: float = 1.0) -> np.ndarray:
    p = np.exp(sharp * RNG.normal(size=size))
    return (p / p.sum()).astype(np.float32)


draw = jax.jit(sm.gumbel_sample, compiler_options=AS_FOR_USERS)  # many rows


def test_one_draw_has_the_law():
    p = law(7, 1.5)
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
def test_draws_agree_as_often_as_they_should(near):
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which is at least (1 - d) / (1 + d)."""
    p = law(9).astype(np.float64)
    q = p * np.exp(near * RNG.normal(size=9))
    q /= q.sum()
    agree = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    distance = np.abs(p - q).sum() / 2
    assert agree >= (1 - distance) / (1 + distance)
    a, b = (draw(keys(N), jnp.tile(x.astype(np.float32), (N, 1))) for x in (p, q))
    assert abs(np.mean(a == b) - agree) < 4 * np.sqrt(agree * (1 - agree) / N)


def test_broken_rows_have_no_token():
    probs = jnp.asarray([[0.5, np.nan, 0.5], [0, 0, 0], [0, 1, 0]], jnp.float32)
    np.testing.assert_array_equal(draw(keys(3), probs), [sm.NO_TOKEN, sm.NO_TOKEN, 1])


def test_the_verdict_keeps_what_the_target_draws():
    rows, depth, vocab = 500, 3, 6
    target = np.stack([[law(vocab) for _ in range(depth + 1)] for _ in range(rows)])
    each = jnp.stack([keys(rows, i) for i in range(depth + 1)], axis=1)
    own = np.asarray(draw(each, target))
    drafts = np.where(RNG.random((rows, depth)) < 0.6, own[:, :-1], RNG.integers(-1, vocab, (rows, depth)))
    num_drafts = RNG.integers(0, depth + 1, rows)
    verdict = vf.coupled(each, jnp.asarray(target), jnp.asarray(drafts, jnp.int32), jnp.asarray(num_drafts))
    accepted = np.asarray(verdict.accepted)
    for row in range(rows):
        count = 0
        while count < num_drafts[row] and drafts[row, count] == own[row, count]:
            count += 1
        assert accepted[row] == count
    np.testing.assert_array_equal(verdict.token, own[np.arange(rows), accepted])
    assert len(np.unique(accepted)) == depth + 1
