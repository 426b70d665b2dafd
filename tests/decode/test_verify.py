"""Losslessness: what a drafting and verifying loop emits has the target's joint distribution, by chi-square.

The target and the drafter are Markov chains, so the exact law of the first tokens is a product of rows, each
computed alone from its whole history; `test_sampling` checks such rows against float64 references.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode import sampling as sm
from mtp_jax.decode import verify as vf
from tests.decode.law import chi_square, continuations

V, LENGTH, ROWS = 6, 3, 5_000  # vocabulary, emitted tokens compared, rows per configuration
DEPTH = 3  # drafts per step
START = 0  # the newest token when the loop begins
_DATA = np.random.default_rng(0).normal(size=(2, V, V))
TARGET = (1.2 * _DATA[0]).astype(np.float32)  # logits after each token
DRAFTER = (TARGET + _DATA[1]).astype(np.float32)
LOSSLESS = {"rejection": vf.rejection, "block": vf.block}
Verifier = Callable[..., vf.Verdict]

# Every transform, one configuration each; all of them run as rows of the same batch.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all three": {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "presence": {"presence": 1.5},
    "frequency": {"frequency": 0.9},
    "repetition": {"repetition": 1.8, "prompt_mask": np.arange(V) == 4},
    "logit_bias": {"logit_bias": np.array([0, 2.0, 0, -np.inf, 0, -1.0])},
    "min_tokens": {"min_tokens": 2, "stop_mask": np.arange(V) >= 4},
}


@functools.cache
def neutral_row() -> sm.SamplingState:
    return jax.tree.map(np.asarray, sm.neutral_state(1, V))


def build_state(configs: list[dict[str, Any]], rows: int, seed: int = 0) -> sm.SamplingState:
    """`rows` rows of each configuration, one after the other, each with its own seed."""
    total, neutral = rows * len(configs), neutral_row()
    changed: dict[str, Any] = {"seed": np.arange(seed * total, (seed + 1) * total, dtype=np.uint32)}
    for name in {name for config in configs for name in config}:
        like = getattr(neutral, name)
        values = [np.broadcast_to(config.get(name, like[0]), like[0].shape) for config in configs]
        changed[name] = np.repeat(np.stack(values), rows, axis=0).astype(like.dtype)
    whole = jax.tree.map(lambda a: np.repeat(a, total, axis=0), neutral)
    return dataclasses.replace(whole, **changed)


def full_depth(s: sm.SamplingState) -> np.ndarray:
    return np.full(len(s.seed), DEPTH, np.int32)


def emit(
    s: sm.SamplingState,
    num_drafts: np.ndarray,
    verifier: Verifier,
    greedy_drafts: bool = False,
    key_by_step: bool = True,
) -> jax.Array:
    """The first LENGTH tokens [B, LENGTH] of every row, by drafting and verifying as the engine does."""
    return _emit(s, num_drafts, VERIFIERS.index(verifier), greedy_drafts, key_by_step)


# So many rows would run for long without optimisation. There is one program for all verifiers.
OPTIMISED = {"xla_backend_optimization_level": 1}


@functools.partial(jax.jit, static_argnames="key_by_step", compiler_options=OPTIMISED)
def _emit(
    s: sm.SamplingState, num_drafts: jax.Array, verifier: jax.Array, greedy: jax.Array, key_by_step: bool
) -> jax.Array:
    rows = len(s.seed)
    target, drafter = jnp.asarray(TARGET), jnp.asarray(DRAFTER)
    each = jnp.arange(rows)

    def one_step(_, carry):
        out, done, newest, counts = carry

        def draft(i, drafted):
            tokens, q, seen = drafted
            logits = sm.adjust(drafter[tokens[:, i]][:, None], s, seen[:, None], (done + i)[:, None])
            probs = sm.distribution(logits, s)[:, 0]
            keys = sm.row_keys(s.seed, done if key_by_step else done + i, sm.Purpose.DRAFT + i * key_by_step)
            token = jnp.where(greedy, jnp.argmax(probs, -1), sm.sample(keys, probs)).astype(jnp.int32)
            probs = jnp.where(greedy, jax.nn.one_hot(token, V), probs)
            return tokens.at[:, i + 1].set(token), q.at[:, i].set(probs), seen.at[each, token].add(1)

        window = jnp.zeros((rows, DEPTH + 1), jnp.int32).at[:, 0].set(newest)
        tokens, q, _ = jax.lax.fori_loop(0, DEPTH, draft, (window, jnp.zeros((rows, DEPTH, V)), counts))
        generated = done[:, None] + jnp.arange(DEPTH + 1)
        p = sm.distribution(sm.adjust(target[tokens], s, sm.window_counts(counts, tokens), generated), s)
        accept, residual = (sm.row_keys(s.seed, done, p) for p in (sm.Purpose.ACCEPT, sm.Purpose.RESIDUAL))
        given = accept, residual, p, q, tokens[:, 1:], num_drafts
        verdict = jax.lax.switch(verifier, VERIFIERS, *given)

        emitted = jnp.arange(DEPTH + 1) <= verdict.accepted[:, None]
        chosen = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))).at[each, verdict.accepted].set(verdict.token)
        place = jnp.where(emitted, generated, out.shape[1])
        out = out.at[each[:, None], place].set(chosen, mode="drop")
        counts = counts.at[each[:, None], chosen].add(emitted.astype(jnp.int32))
        return out, done + verdict.accepted + 1, verdict.token, counts

    blank = jnp.full((rows, LENGTH * (DEPTH + 1)), -1, jnp.int32)
    begin = (blank, jnp.zeros(rows, jnp.int32), jnp.full(rows, START), s.counts)
    return jax.lax.fori_loop(0, LENGTH, one_step, begin)[0][:, :LENGTH]


@jax.jit
def next_token_law(
    last: jax.Array, counts: jax.Array, generated: jax.Array, s: sm.SamplingState
) -> jax.Array:
    logits = sm.adjust(jnp.asarray(TARGET)[last][:, None], s, counts[:, None], generated[:, None])
    return sm.distribution(logits, s)[:, 0]


@functools.cache
def exact_laws() -> dict[str, np.ndarray]:
    """[V] * LENGTH of each configuration: the probability of every continuation."""
    histories = [h for length in range(LENGTH) for h in itertools.product(range(V), repeat=length)]
    each = [
        np.array([h[-1] if h else START for h in histories]),
        np.stack([np.bincount(np.array(h, int), minlength=V) for h in histories]).astype(np.int32),
        np.array([*map(len, histories)]),
    ]
    given = [np.concatenate([a] * len(CONFIGS)) for a in each]
    rows = next_token_law(*given, build_state([*CONFIGS.values()], len(histories)))
    parts = np.split(np.asarray(rows, np.float64), len(CONFIGS))
    return {name: continuations(part, V, LENGTH) for name, part in zip(CONFIGS, parts, strict=True)}


def exact_law(config: str) -> np.ndarray:
    return exact_laws()[config]


@pytest.mark.rest
@pytest.mark.parametrize("greedy_drafts", [False, True], ids=["sampled drafts", "greedy drafts"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_joint_law_of_the_emitted_tokens_is_the_targets_under_every_transform(name, greedy_drafts):
    s = build_state(list(CONFIGS.values()), ROWS)
    tokens = emit(s, full_depth(s), LOSSLESS[name], greedy_drafts)
    parts = dict(zip(CONFIGS, np.split(np.asarray(tokens), len(CONFIGS)), strict=True))
    p_values = {config: chi_square(part, exact_law(config)) for config, part in parts.items()}
    # So that all together are wrong once in a hundred times.
    assert min(p_values.values()) > 0.01 / len(CONFIGS), p_values


@pytest.mark.rest
@pytest.mark.parametrize("name", LOSSLESS)
def test_rows_of_different_depth_share_a_batch(name):
    s = build_state([{}] * len(CONFIGS), ROWS, seed=1)
    num_drafts = np.arange(len(s.seed), dtype=np.int32) % (DEPTH + 1)
    tokens = emit(s, num_drafts, LOSSLESS[name])
    for depth in range(DEPTH + 1):
        assert chi_square(np.asarray(tokens)[num_drafts == depth], exact_law("plain")) > 0.01 / (DEPTH + 1), (
            depth
        )


# (how often to keep a draft, what to draw the correction from); the last mixes both algorithms
MISTAKES = {
    "none": ("p/q", "p-q"),
    "correction from p": ("p/q", "p"),
    "correction from |p-q|": ("p/q", "|p-q|"),
    "ratio upside down": ("q/p", "p-q"),
    "draft probability ignored": ("p", "p-q"),
    "block residual after token tests": ("p/q", "block"),
}


def mistaken(keys_accept, keys_residual, p, q, drafts, num_drafts):
    """Token-by-token verification, written out; the batch is split evenly among the MISTAKES."""
    px, qx = (jnp.take_along_axis(x, drafts[..., None], -1)[..., 0] for x in (p[:, :-1], q))
    none = jnp.ones((len(drafts), 1))
    reach = functools.reduce(
        lambda r, x: jnp.append(r, jnp.minimum(r[:, -1:] * x[:, None], 1), 1), (px / qx).T, none
    )
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    keeps = {"p/q": px / qx, "q/p": qx / px, "p": px}
    rests = {"p-q": p - q, "p": p, "|p-q|": jnp.abs(p - q), "block": reach[..., None] * p - q}

    mistake = jnp.arange(len(drafts)) * len(MISTAKES) // len(drafts)
    pick = [mistake[:, None] == i for i in range(len(MISTAKES))]
    keep = jnp.select(pick, [keeps[k] for k, _ in MISTAKES.values()])
    u = jax.vmap(lambda key: jax.random.uniform(key, (drafts.shape[1],)))(keys_accept)
    accepted = jnp.cumprod(u < keep, 1).sum(1)
    rest = [jnp.take_along_axis(r, accepted[:, None, None], 1)[:, 0] for r in rests.values()]
    rest = jnp.select(pick, [rest[list(rests).index(r)] for _, r in MISTAKES.values()])
    return vf.Verdict(accepted, sm.sample(keys_residual, jnp.maximum(rest, 0)))


VERIFIERS: list[Verifier] = [vf.rejection, vf.block, mistaken]


@pytest.mark.rest
def test_the_check_tells_right_from_wrong():
    s = build_state([{}] * len(CONFIGS), ROWS, seed=2)
    tokens = emit(s, full_depth(s), mistaken)
    parts = zip(MISTAKES, np.split(np.asarray(tokens), len(MISTAKES)), strict=True)
    p_values = {mistake: chi_square(part, exact_law("plain")) for mistake, part in parts}
    assert p_values.pop("none") > 0.01
    assert max(p_values.values()) < 1e-6, p_values


@pytest.mark.slow
def test_drafts_keyed_by_their_own_position_would_bias_block_verification():
    s = build_state([{}] * len(CONFIGS), ROWS, seed=3)
    full = full_depth(s)
    right, wrong = (np.asarray(emit(s, full, vf.block, key_by_step=by_step)) for by_step in (True, False))
    assert chi_square(right, exact_law("plain")) > 0.01
    assert chi_square(wrong, exact_law("plain")) < 1e-6


N = 20_000  # windows per test below: with DEPTH, one shape and so one executable for all of them


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x)
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def drawn_from(probs: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).exponential(size=probs.shape)
    return np.argmin(noise / probs, -1).astype(np.int32)


def windows(seed: int):
    """Unrelated random windows: (target [N, W, V], draft [N, K, V], drafts [N, K] drawn from draft)."""
    rng = np.random.default_rng(seed)
    target, draft = softmax(rng.normal(0, 1.5, (N, DEPTH + 1, V))), softmax(rng.normal(0, 1, (N, DEPTH, V)))
    return target, draft, drawn_from(draft, seed)


@functools.partial(jax.jit, static_argnames="name")
def run(name: str, target, draft, drafts, num_drafts, seed=0) -> vf.Verdict:
    accept, residual = coins(len(drafts), seed)
    return LOSSLESS[name](accept, residual, target, draft, drafts, num_drafts)


def coins(rows: int, seed=0):
    row, position = jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, seed)
    return [sm.row_keys(row, position, p) for p in (sm.Purpose.ACCEPT, sm.Purpose.RESIDUAL)]


FULL = np.full(N, DEPTH)
ONE_HOT = np.eye(V, dtype=np.float32)


@pytest.mark.parametrize("name", LOSSLESS)
def test_acceptance_of_one_draft_is_the_overlap_of_the_distributions(name):
    p, q = softmax(TARGET[1]), softmax(DRAFTER[1])
    target, draft = np.broadcast_to(p, (N, DEPTH + 1, V)), np.broadcast_to(q, (N, DEPTH, V))
    accepted = run(name, target, draft, drawn_from(draft, 4), np.ones(N, int)).accepted
    overlap = np.minimum(p, q).sum()
    assert abs(accepted.mean() - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / N)


def test_the_papers_example_accepts_ten_and_eleven_ninths():
    """arXiv 2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts."""
    p, q = np.zeros(V, np.float32), np.zeros(V, np.float32)
    p[:2], q[:2] = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    target, draft = np.broadcast_to(p, (N, DEPTH + 1, V)), np.broadcast_to(q, (N, DEPTH, V))
    drafts = drawn_from(np.maximum(draft, 1e-30), 5)
    for name, mean in {"rejection": 10 / 9, "block": 11 / 9}.items():
        accepted = run(name, target, draft, drafts, np.full(N, 2)).accepted
        assert abs(accepted.mean() - mean) < 4 * accepted.std() / np.sqrt(N), name


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_block_accepts_at_least_as_many_as_rejection(greedy_drafts):
    target, draft, drafts = windows(6)
    if greedy_drafts:
        drafts = draft.argmax(-1).astype(np.int32)
        draft = ONE_HOT[drafts]
    accepted = {name: np.asarray(run(name, target, draft, drafts, FULL).accepted, float) for name in LOSSLESS}
    gain = accepted["block"] - accepted["rejection"]
    # Theorem 2 is about expectations: allow for noise, and ask for a real gain where drafts are sampled.
    noise = 4 * gain.std() / np.sqrt(N)
    assert gain.mean() > (-noise if greedy_drafts else noise)


@pytest.mark.parametrize("one_hot_draft", [pytest.param(False, marks=pytest.mark.rest), True])
@pytest.mark.parametrize("name", LOSSLESS)
def test_temperature_zero_is_exactly_greedy_whatever_the_random_numbers(name, one_hot_draft):
    _, draft, drafts = windows(7)
    rng = np.random.default_rng(8)
    ids = rng.integers(0, V, (N, DEPTH + 1), np.int32)
    drafts = np.where(rng.random(drafts.shape) < 0.7, ids[:, :-1], drafts)
    if one_hot_draft:
        draft = ONE_HOT[drafts]
    num_drafts = rng.integers(0, DEPTH + 1, N)
    expected = vf.greedy(jnp.asarray(ids), jnp.asarray(drafts), jnp.asarray(num_drafts))
    for seed in range(3):
        got = run(name, ONE_HOT[ids], draft, drafts, num_drafts, seed)
        np.testing.assert_array_equal(got.accepted, expected.accepted)
        np.testing.assert_array_equal(got.token, expected.token)
    assert len(np.unique(expected.accepted)) == DEPTH + 1


def test_greedy_by_hand():
    ids = jnp.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 2, 3], [-1, 2, 3]])
    drafts = jnp.array([[1, 2], [1, 0], [1, 2], [1, 2], [-1, 2]])
    got = vf.greedy(ids, drafts, jnp.array([2, 2, 1, 2, 2]))
    np.testing.assert_array_equal(got.accepted, [2, 1, 1, 0, 0])
    np.testing.assert_array_equal(got.token, [3, 2, 2, 4, -1])


@pytest.mark.parametrize("name", ["block", pytest.param("rejection", marks=pytest.mark.rest)])
def test_no_drafts_at_all_is_plain_sampling(name):
    target, draft, drafts = windows(12)
    plain = jax.jit(sm.sample)(coins(N)[1], target[:, 0])
    for got in (
        run(name, target[:, :1], draft[:, :0], drafts[:, :0], np.zeros(N, int)),
        run(name, target, draft, drafts, np.zeros(N, int)),
    ):
        np.testing.assert_array_equal(got.accepted, 0)
        np.testing.assert_array_equal(got.token, plain)


@pytest.mark.parametrize("name", ["block", pytest.param("rejection", marks=pytest.mark.rest)])
def test_a_row_does_not_notice_the_width_of_the_window(name):
    target, draft, drafts = windows(13)
    wide = run(name, target, draft, drafts, np.full(N, 1))
    narrow = run(name, target[:, :2], draft[:, :1], drafts[:, :1], np.full(N, 1))
    np.testing.assert_array_equal(wide.accepted, narrow.accepted)
    np.testing.assert_array_equal(wide.token, narrow.token)


@pytest.mark.parametrize("name", LOSSLESS)
def test_identical_models_accept_everything(name):
    target, _, _ = windows(14)
    got = run(name, target, target[:, :-1], drawn_from(target[:, :-1], 15), FULL)
    np.testing.assert_array_equal(got.accepted, DEPTH)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_broken_target_row_is_reported_and_alone(name):
    target, draft, drafts = windows(16)
    clean = run(name, target, draft, drafts, FULL)
    broken = np.arange(N) % 3 == 0
    target[broken, 1] = np.nan
    got = run(name, target, draft, drafts, FULL)
    reached = broken & (np.asarray(got.accepted) >= 1)
    assert reached.sum() > 100
    np.testing.assert_array_equal(got.accepted[reached], 1)
    np.testing.assert_array_equal(got.token == sm.NO_TOKEN, reached)
    np.testing.assert_array_equal(got.token[~broken], clean.token[~broken])
    np.testing.assert_array_equal(got.accepted[~broken], clean.accepted[~broken])


@pytest.mark.parametrize("what", ["distribution", "id", "both"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_broken_draft_costs_only_speed(name, what):
    target, draft, drafts = windows(17)
    broken = np.arange(N) % 3 == 0
    expected = run(name, target, draft, drafts, np.where(broken, 1, DEPTH))
    if what != "id":
        draft[broken, 1] = np.nan
    if what != "distribution":
        drafts[broken, 1] = sm.NO_TOKEN
    got = run(name, target, draft, drafts, FULL)
    np.testing.assert_array_equal(got.accepted, expected.accepted)
    np.testing.assert_array_equal(got.token, expected.token)
