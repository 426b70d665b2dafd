"""The transforms against plain float64 references that sort, and the random draws against the exact law."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from mtp_jax.decode import sampling as sm
from tests.rounding import error, near

B, W, V = 3, 2, 17
distribution = jax.jit(sm.distribution)
adjust = jax.jit(sm.adjust)
draw = jax.jit(sm.sample)
window_counts = jax.jit(sm.window_counts)
row_keys = jax.jit(sm.row_keys)
point_mass, likeliest, all_finite = (jax.jit(f) for f in (sm.point_mass, sm.likeliest, sm.all_finite))
# Roundings of a probability whose exponent is exact: a sum of exponentials, and a quotient.
OF_SOFTMAX = V + 4


def state(fields: dict[str, Any], slots: int = B, vocab: int = V) -> sm.SamplingState:
    neutral = neutral_state(slots, vocab)
    changed = {
        name: np.broadcast_to(np.asarray(value, getattr(neutral, name).dtype), getattr(neutral, name).shape)
        for name, value in fields.items()
    }
    return dataclasses.replace(neutral, **changed)


@functools.cache
def neutral_state(slots: int, vocab: int) -> sm.SamplingState:
    return jax.tree.map(np.asarray, sm.neutral_state(slots, vocab))


def expected_row(logits, temperature, top_k, top_p, min_p):
    """One row by sorting, in float64. Returns (probabilities, whether top_p was decided by rounding)."""
    x = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(x))[np.argmax(x)], False
    x = (x - x.max()) / np.float64(temperature)
    with np.errstate(divide="ignore"):
        x[x < np.log(np.float64(min_p))] = -np.inf
    order = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        x[x < x[order[top_k - 1]]] = -np.inf
    p = np.exp(x) / np.exp(x).sum()
    close = False
    if top_p < 1:
        above = np.array([p[p > value].sum() for value in p])
        close = top_p > 0 and bool(np.any(np.abs(above - np.float64(top_p)) < 1e-5))
        p[above >= max(top_p, 1e-300)] = 0
        p /= p.sum()
    return p, close


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 5, V - 1, V, V + 50]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6, 0.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(ROW, min_size=B, max_size=B),
    seed=st.integers(0, 2**32 - 1),
    coarse=st.booleans(),
    masked=st.integers(0, V - 1),
)
def test_distribution_matches_the_sorting_reference(rows, seed, coarse, masked):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (B, W, V)).astype(np.float32)
    if coarse:  # many exact ties, zeros of both signs
        logits = np.round(logits / 2) * np.float32(rng.choice([1, -1]))
    logits[:, :, rng.permutation(V)[:masked]] = -np.inf
    s = state({name: [row[name] for row in rows] for name in rows[0]})
    got = np.asarray(distribution(logits, s))
    for b in range(B):
        for w in range(W):
            p, close = expected_row(logits[b, w], **rows[b])
            assume(not close)
            # An exponent is rounded three times, and its error is the relative error of the power.
            here = (p > 1e-30) & (got[b, w] > 0)
            off = np.abs(np.log(got[b, w][here] / p[here]))
            assert (off <= error(3, np.log(p.max() / p[here])) + error(OF_SOFTMAX)).all()
            assert (p[got[b, w] == 0] < 1e-30).all()  # nothing but an underflow is lost
            assert (got[b, w][p == 0] == 0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 1.5, -0.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
    min_tokens=st.integers(0, 6),
)
def test_adjust_replays_the_window_token_by_token(seed, repetition, presence, frequency, min_tokens):
    rng = np.random.default_rng(seed)
    width = 4
    logits = rng.normal(0, 3, (B, width, V)).astype(np.float32)
    tokens = rng.integers(0, 4, (B, width))  # few ids, so that they repeat inside the window
    output = [[*rng.integers(0, V, 3), row[0]] for row in tokens]  # ends with the window's first token
    prompt, stop = rng.random((B, V)) < 0.3, rng.random((B, V)) < 0.2
    bias = rng.normal(0, 1, (B, V)).astype(np.float32)
    s = state(
        {
            "repetition": repetition, "presence": presence, "frequency": frequency, "min_tokens": min_tokens,
            "logit_bias": bias, "prompt_mask": prompt, "stop_mask": stop,
            "counts": np.stack([np.bincount(row, minlength=V) for row in output]),
        }
    )  # fmt: skip
    counts = window_counts(s.counts, tokens.astype(np.int32))
    generated = np.array([[len(row) + i for i in range(width)] for row in output])
    got, want = adjust(logits, s, counts, generated), np.zeros(logits.shape)
    for b in range(B):
        for i in range(width):
            history = output[b] + list(tokens[b, 1 : i + 1])
            for v in range(V):
                x = np.float64(logits[b, i, v]) + bias[b, v]
                if stop[b, v] and len(history) < min_tokens:
                    x = -np.inf
                if v in history or prompt[b, v]:
                    x = x / repetition if x > 0 else x * repetition
                x -= frequency * history.count(v) + presence * (v in history)
                want[b, i, v] = x
    near(got, want, terms=6)  # bias, repetition, and two products and sums


def test_neutral_state_changes_nothing(rng):
    logits = rng.normal(0, 3, (B, W, V)).astype(np.float32)
    logits[0, 0, 3], logits[1, 1, 4] = -np.inf, np.nan
    s, none = neutral_state(B, V), np.zeros((B, W), np.int32)
    np.testing.assert_array_equal(adjust(logits, s, window_counts(s.counts, none), none), logits)
    want = np.exp(logits[0].astype(np.float64))
    near(distribution(logits, s)[0], want / want.sum(-1, keepdims=True), OF_SOFTMAX)


def test_ties_at_the_boundary_are_all_kept_and_greedy_takes_the_lowest_id():
    logits = np.tile(np.array([1, 3, 2, 2, 3, 2], np.float32), (5, 1, 1))
    s = state(
        {"temperature": [0, 1, 1, 1, 1], "top_k": [0, 1, 3, 0, 0], "top_p": [1, 1, 1, 0.61, 0.63]}, 5, 6
    )
    got = np.asarray(distribution(logits, s))[:, 0]
    np.testing.assert_array_equal(got[0], [0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(got[1] > 0, [0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(got[2] > 0, [0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(got[3] > 0, [0, 1, 0, 0, 1, 0])  # the two tops hold 0.617 of the mass
    np.testing.assert_array_equal(got[4] > 0, [0, 1, 1, 1, 1, 1])
    near(got.sum(-1), np.ones(5), 2 * 6)


def test_zeros_of_both_signs_are_one_value_for_top_k():
    logits = np.array([[[-0.0, 0.0, -1.0]], [[0.0, -0.0, -1.0]]], np.float32)
    got = np.asarray(distribution(logits, state({"top_k": 1}, 2, 3)))
    np.testing.assert_array_equal(got[:, 0], [[0.5, 0.5, 0]] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "all masked"])
def test_a_broken_row_stays_broken_and_alone(rng, temperature, bad):
    logits = rng.normal(0, 3, (B, W, V)).astype(np.float32)
    s = state({"temperature": temperature, "top_k": 5, "top_p": 0.9, "min_p": 0.05})
    clean = np.asarray(distribution(logits, s))
    broken = logits.copy()
    broken[1, 0] = {"nan": np.nan, "inf": np.inf, "all masked": -np.inf}.get(bad, broken[1, 0])
    if bad == "one nan":
        broken[1, 0, 7] = np.nan
    got = np.array(distribution(broken, s))
    assert np.isnan(got[1, 0]).all()
    got[1, 0] = clean[1, 0]
    np.testing.assert_array_equal(got, clean)
    keys = row_keys(np.arange(2, dtype=np.uint32), np.zeros(2, np.int32), sm.Purpose.SAMPLE)
    tokens = draw(keys, np.array([[np.nan] * V, clean[0, 0]], np.float32))
    assert tokens[0] == sm.NO_TOKEN
    assert tokens[1] >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_logit_of_a_large_vocabulary_breaks_its_row(rng, temperature, bad):
    """A maximum over many numbers may pass over NaN on a CPU."""
    logits = rng.normal(0, 3, (B, W, 8192)).astype(np.float32)
    logits[1, 1, 77], logits[0, 0, 5:9] = bad, -np.inf
    broken = np.zeros((B, W), bool)
    broken[1, 1] = True
    s = state({"temperature": temperature}, B, 8192)
    for found in (distribution(logits, s), point_mass(logits)):
        np.testing.assert_array_equal(np.isnan(found).all(-1), broken)
        np.testing.assert_array_equal(np.isnan(found).any(-1), broken)
    np.testing.assert_array_equal(likeliest(logits) == sm.NO_TOKEN, broken)
    np.testing.assert_array_equal(all_finite(logits), np.isfinite(logits).all(-1))


def test_all_but_one_masked_and_extreme_temperatures():
    logits = np.full((B, W, V), -np.inf, np.float32)
    logits[..., 5] = 1e30
    s = state({"temperature": [0, 1e-30, 1e30], "top_k": 3, "top_p": 0.5, "min_p": 0.5})
    np.testing.assert_array_equal(distribution(logits, s), np.broadcast_to(np.eye(V)[5], (B, W, V)))


def test_mixed_rows_equal_rows_alone(rng):
    logits = rng.normal(0, 3, (6, W, V)).astype(np.float32)
    fields = {
        "temperature": [0, 1, 0.5, 2, 1, 1], "top_k": [0, 0, 4, 0, V, 2], "top_p": [1, 1, 0.7, 0.9, 1, 0.5],
        "min_p": [0, 0.1, 0, 0.02, 0, 0], "repetition": [1, 1.2, 1, 1, 1.5, 1], "seed": [5, 4, 3, 2, 1, 0],
        "presence": [0, 0, 1, 0, 0, 2], "frequency": [0.5, 0, 0, 0, 0.1, 0], "min_tokens": [0, 9, 0, 3, 0, 0],
        "stop_mask": rng.random((6, V)) < 0.2, "counts": rng.integers(0, 2, (6, V)),
    }  # fmt: skip
    fields = {name: np.asarray(value) for name, value in fields.items()}
    tokens = rng.integers(0, V, (6, W)).astype(np.int32)

    @jax.jit
    def run(logits, s, tokens):
        generated = jnp.broadcast_to(jnp.arange(W) + 2, tokens.shape)
        probs = sm.distribution(sm.adjust(logits, s, sm.window_counts(s.counts, tokens), generated), s)
        position = jnp.full(len(tokens), 7)
        return probs, sm.sample(sm.row_keys(s.seed, position, sm.Purpose.SAMPLE), probs[:, 0])

    together = run(logits, state(fields, 6), tokens)
    for b in range(6):
        row = slice(b, b + 1)
        only = {name: value[row] for name, value in fields.items()}
        alone = run(logits[row], state(only, 1), tokens[row])
        near(together[0][row], alone[0], OF_SOFTMAX)
        np.testing.assert_array_equal(together[1][row], alone[1])


def test_row_keys_depend_on_seed_position_and_purpose_only(rng):
    @jax.jit
    def words(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
        return jax.random.key_data(sm.row_keys(seed, position, purpose))

    seed, position = rng.integers(0, 2**32, 64).astype(np.uint32), rng.integers(0, 9, 64).astype(np.int32)
    data, order = np.asarray(words(seed, position, sm.Purpose.ACCEPT)), rng.permutation(64)
    np.testing.assert_array_equal(words(seed[order], position[order], sm.Purpose.ACCEPT), data[order])
    purposes = [*sm.Purpose, sm.Purpose.DRAFT + 1, sm.Purpose.DRAFT + 2]
    keys = [np.asarray(words(seed, position + i, p)) for p in purposes for i in range(3)]
    distinct = {tuple(k) for many in keys for k in many}
    assert len(distinct) == 64 * len(keys)


@pytest.mark.parametrize("vocab", [1, 2, 9, pytest.param(1000, marks=pytest.mark.rest)])
def test_sample_has_the_exact_law_and_never_draws_probability_zero(rng, vocab):
    rows = 20_000
    p = rng.gamma(0.5, size=vocab)
    p[rng.random(vocab) < 0.4] = 0
    p[-1] = 0.0 if vocab > 1 else 1.0
    p[0] += p.sum() == 0
    p /= p.sum()
    keys = row_keys(np.arange(rows, dtype=np.uint32), np.zeros(rows, np.int32), sm.Purpose.SAMPLE)
    probs = np.tile(0.3 * p.astype(np.float32), (rows, 1))  # not normalised
    seen = np.bincount(np.asarray(draw(keys, probs)), minlength=vocab)
    assert (seen[p == 0] == 0).all()
    likely = p * rows >= 5
    observed = np.append(seen[likely], seen[~likely].sum())
    expected = np.append(p[likely], p[~likely].sum()) * rows
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(observed[kept], expected[kept]).pvalue > 0.01


def test_top_logprobs_are_the_models_own(rng):
    logits = np.round(rng.normal(0, 3, (B, W, V)).astype(np.float32)) + 0.0  # ties, and no -0.0
    chosen, top = rng.integers(0, V, (B, W)), jax.jit(sm.top_logprobs, static_argnums=2)
    got = top(logits, chosen, 5)
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    order = np.argsort(-x, axis=-1, kind="stable")[..., :5]
    at = np.take_along_axis(expected, chosen[..., None], -1)
    np.testing.assert_array_equal(got.ids, order)
    near(got.values, np.take_along_axis(expected, order, -1), OF_SOFTMAX, size=np.abs(logits).max())
    near(got.chosen, at[..., 0], OF_SOFTMAX, size=np.abs(logits).max())
    np.testing.assert_array_equal(got.rank, (expected >= at).sum(-1))
    assert top(logits, chosen, 0).ids.shape == (B, W, 0)
    everything = top(logits, chosen, V + 8)  # no more than there are
    np.testing.assert_array_equal(everything.ids, np.argsort(-x, axis=-1, kind="stable"))
