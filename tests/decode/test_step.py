"""The compiled step emits the target's joint distribution: chi-square against a cache-free model.

One prefill and three steps over thousands of slots of a tiny model give as many samples of the first tokens.
Their exact law is a product of rows that a cache-free forward pass computes for every possible history. Rows
differ in options and in depth, side by side in one batch.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mtp_jax.decode.drafter.build import build
from mtp_jax.decode.host import Chunk
from mtp_jax.decode.keys import ACCEPTED, DRAFTED, SamplingMode
from mtp_jax.decode.sampling import adjust, distribution, neutral_state
from mtp_jax.decode.state import State, StateShape, abstract_state, empty_state
from mtp_jax.decode.step import draft_phase, step, verify_phase
from mtp_jax.model import trunk
from mtp_jax.model.backend import XlaCpu
from mtp_jax.model.params import Params
from tests.models import TINY, rigged

V, LENGTH, DEPTH, ROWS = 5, 4, 3, 6000
PROMPT = [3, 1, 4]
CFG = replace(TINY, vocab_size=V, num_attention_heads=2, first_k_dense_replace=2, eos_token_ids=())
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"temperature": 1.6, "top_k": 3},
    "top_p": {"top_p": 0.8},
    "penalties": {"repetition": 1.5, "frequency": 0.4, "presence": 0.3},
}
ON = XlaCpu(experts="dense")
DRAFTER = build(CFG)


@functools.cache
def params() -> Params:
    return rigged(CFG, seed=2, loud=0.7, noise=0.1, contrast=0.5)


def start(depths: np.ndarray) -> State:
    """Every slot with a page of its own, ``ROWS`` slots of each option."""
    slots = ROWS * len(OPTIONS)
    state = empty_state(abstract_state(CFG, DRAFTER, StateShape(slots, slots, 16, 1), "float32", None))
    sampling = replace(
        neutral_state(slots, V),
        seed=jnp.arange(slots, dtype=jnp.uint32),
        prompt_mask=jnp.tile(jnp.isin(jnp.arange(V), jnp.array(PROMPT)), (slots, 1)),
        **{
            name: per_row(name)
            for name in ("temperature", "top_k", "top_p", "repetition", "frequency", "presence")
        },
    )
    table = jnp.arange(slots, dtype=jnp.int32)[:, None]
    many = jnp.full(slots, 100, jnp.int32)
    rows = replace(
        state.slots, page_table=table, remaining=many, depth=jnp.asarray(depths, jnp.int32), sampling=sampling
    )
    return replace(state, slots=rows)


def per_row(name: str) -> jax.Array:
    neutral = getattr(neutral_state(1, V), name)
    return jnp.asarray(np.repeat([o.get(name, neutral[0]) for o in OPTIONS.values()], ROWS), neutral.dtype)


@dataclass(frozen=True)
class Emitted:
    """Of every slot: the first LENGTH tokens, accepted and verified drafts."""

    tokens: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray


def allowed(last: jax.Array) -> jax.Array:
    """The packed masks of a grammar in which no token follows itself: last [B, W] -> uint32 [B, W, 1]."""
    return (2**V - 1 - (1 << last))[..., None].astype(jnp.uint32)


@functools.cache
def emitted(drafting: Any, verifier: Any, grammar: bool = False) -> Emitted:
    slots = ROWS * len(OPTIONS)

    def full(x: Any, dtype: Any = np.int32) -> jax.Array:
        return jnp.full(slots, x, dtype)

    tokens = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (slots, 1))
    each = jnp.arange(slots, dtype=jnp.int32)
    first = allowed(tokens[:, -1:])[:, 0] if grammar else jnp.full((slots, 1), 2**V - 1, jnp.uint32)
    chunk = Chunk(
        each, full(0), full(len(PROMPT)), full(True, bool), tokens, -jnp.ones_like(tokens), full(-1), first
    )
    mode = SamplingMode(drafting, verifier)
    fixed: dict[str, Any] = {"cfg": CFG, "drafter": DRAFTER, "pages": 1, "mode": mode, "on": ON}
    begin = functools.partial(step, slots=0, depth=0, **fixed)
    propose = functools.partial(draft_phase, slots=slots, depth=DEPTH, **fixed)
    # Depths 1, 2, 3 and sometimes 0.
    state = start(np.where(np.arange(slots) % 7 == 0, 0, 1 + np.arange(slots) % DEPTH))
    state, first = jax.jit(begin, donate_argnums=1)(params(), state, chunk)
    columns, accepted, drafted = [np.asarray(first.packed)[:, :1]], 0, 0
    whole = jax.jit(functools.partial(step, slots=slots, depth=DEPTH, **fixed), donate_argnums=1)
    halves = (
        jax.jit(propose, donate_argnums=1),
        jax.jit(functools.partial(verify_phase, **fixed), donate_argnums=1),
    )
    for _ in range(LENGTH - 1):
        if grammar:
            newest = state.slots.newest[:, None]
            # What follows the newest token is known, what follows a draft is not.
            known = jnp.full((slots, DEPTH + 1, 1), 2**V - 1, jnp.uint32).at[:, :1].set(allowed(newest))
            state, drafts = halves[0](params(), state, known)
            window = jnp.concatenate([newest, drafts.tokens], axis=1)
            state, result = halves[1](params(), state, drafts, allowed(window))
        else:
            state, result = whole(params(), state)
        packed = np.asarray(result.packed)
        columns.append(packed[:, : DEPTH + 1])
        accepted = accepted + packed[:, DEPTH + 1 + ACCEPTED]
        drafted = drafted + packed[:, DEPTH + 1 + DRAFTED]
    everything = np.concatenate(columns, axis=1)
    order = np.argsort(everything < 0, axis=1, kind="stable")  # the emitted ones first, in order
    return Emitted(
        np.take_along_axis(everything, order, 1)[:, :LENGTH], np.asarray(accepted), np.asarray(drafted)
    )


@functools.cache
def next_logits() -> dict[tuple[int, ...], np.ndarray]:
    """Logits after the prompt and every history shorter than LENGTH."""
    rows = np.array([[*PROMPT, *h] for h in itertools.product(range(V), repeat=LENGTH - 1)], np.int32)
    hidden = jax.jit(lambda p, t: trunk.logits(p, trunk.forward(p, CFG, t)))(params(), rows)
    logits = np.asarray(hidden)
    return {
        tuple(row[len(PROMPT) : len(PROMPT) + n].tolist()): out[len(PROMPT) + n - 1]
        for row, out in zip(rows, logits, strict=True)
        for n in range(LENGTH)
    }


@functools.cache
def exact_law(option: str, grammar: bool = False) -> np.ndarray:
    """[V] * LENGTH: the probability of every continuation."""
    law = np.ones((V,) * LENGTH)
    for n in range(LENGTH):
        histories = list(itertools.product(range(V), repeat=n))
        logits = np.stack([next_logits()[h] for h in histories])[:, None]
        counts = np.stack([np.bincount(np.array(h, int), minlength=V) for h in histories])[:, None]
        s = neutral_state(len(histories), V)
        changed = {k: jnp.full_like(getattr(s, k), v) for k, v in OPTIONS[option].items()}
        s = replace(
            s,
            prompt_mask=jnp.tile(jnp.isin(jnp.arange(V), jnp.array(PROMPT)), (len(histories), 1)),
            **changed,
        )
        adjusted = adjust(
            jnp.asarray(logits), s, jnp.asarray(counts, jnp.int32), jnp.full((len(histories), 1), n)
        )
        if grammar:
            last = jnp.array([(PROMPT[-1], *h)[-1] for h in histories])
            adjusted = adjusted.at[jnp.arange(len(histories)), 0, last].set(-jnp.inf)
        rows = np.asarray(distribution(adjusted, s), np.float64)[:, 0]
        law *= rows.reshape((V,) * (n + 1) + (1,) * (LENGTH - n - 1))
    return law / law.sum()


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    """The p-value of tokens [N, LENGTH] against the law; cells too rare for the test are pooled."""
    seen = np.zeros(law.shape)
    np.add.at(seen, tuple(tokens.T), 1)
    seen, wanted = seen.ravel(), law.ravel() * len(tokens)
    assert not seen[wanted == 0].any(), "a token of probability zero was emitted"
    rare = wanted < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    kept = wanted > 0
    return float(stats.chisquare(seen[kept], wanted[kept] * seen[kept].sum() / wanted[kept].sum()).pvalue)


MODES = [*itertools.product(("sampled", "greedy"), ("rejection", "block")), ("sampled", "coupled")]


@pytest.mark.parametrize(("drafting", "verifier"), MODES)
def test_lossless(drafting, verifier):
    """Nothing is fitted: seeds are fixed, so each p-value is one draw that must not be absurdly small."""
    got = emitted(drafting, verifier)
    assert (got.tokens >= 0).all()
    for i, option in enumerate(OPTIONS):
        mine = slice(i * ROWS, (i + 1) * ROWS)
        p = chi_square(got.tokens[mine], exact_law(option))
        assert p > 1e-4, f"{option}: p = {p:.2g}"
        rate = got.accepted[mine].sum() / got.drafted[mine].sum()
        assert rate > (0.4 if drafting == "sampled" else 0.25), (
            f"{option}: only {rate:.0%} of the drafts were accepted"
        )


@pytest.mark.parametrize(("drafting", "verifier"), [("sampled", "block"), ("greedy", "rejection")])
def test_lossless_under_a_grammar(drafting, verifier):
    got = emitted(drafting, verifier, grammar=True)
    for i, option in enumerate(OPTIONS):
        mine = slice(i * ROWS, (i + 1) * ROWS)
        p = chi_square(got.tokens[mine], exact_law(option, grammar=True))
        assert p > 1e-4, f"{option}: p = {p:.2g}"
        assert got.accepted[mine].sum() / got.drafted[mine].sum() > 0.25


def test_the_test_has_power():
    """An option that is ignored, or another law that is not far off, would be noticed."""
    tokens = emitted("sampled", "block").tokens
    for i, option in enumerate(OPTIONS):
        mine = tokens[i * ROWS : (i + 1) * ROWS]
        law = exact_law("plain" if option != "plain" else "penalties")
        assert chi_square(mine, law) < 1e-6


@pytest.mark.parametrize("drafting", ["sampled", "greedy"])
def test_block_verification_accepts_at_least_as_much(drafting):
    """arXiv 2403.10444, Theorem 2, up to sampling noise."""
    block, rejection = (emitted(drafting, v).accepted.mean() for v in ("block", "rejection"))
    assert block > rejection - 0.02


def test_every_mode_is_one_of_its_own():
    found = {mode: emitted(*mode) for mode in MODES if mode[1] != "coupled"}
    assert found["sampled", "block"].accepted.mean() > found["sampled", "rejection"].accepted.mean()
    for one, other in itertools.combinations(found.values(), 2):
        assert (one.accepted != other.accepted).any()
    for verifier in ("block", "rejection"):
        assert found["sampled", verifier].accepted.mean() > found["greedy", verifier].accepted.mean() + 0.05


def test_rows_verify_their_own_depth():
    got = emitted("sampled", "block")
    depths = np.where(np.arange(len(got.drafted)) % 7 == 0, 0, 1 + np.arange(len(got.drafted)) % DEPTH)
    np.testing.assert_array_equal(got.drafted, depths * (LENGTH - 1))
    assert (got.accepted[depths == 0] == 0).all()
    means = [got.accepted[depths == d].mean() for d in range(DEPTH + 1)]
    assert means == sorted(means)
