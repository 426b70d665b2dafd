"""What the compiled step emits, and the exact law that it must have: for chi-square tests of whole steps.

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
from scipy import stats

from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.keys import ACCEPTED, DRAFTED, SOURCE, Origin, SamplingMode, StepKey
from mtp_jax.decode.sampling import adjust, distribution, neutral_state
from mtp_jax.decode.state import State, StateShape
from mtp_jax.decode.step import Step
from mtp_jax.heads.build import build
from mtp_jax.model import trunk
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_rows import with_draft_rows
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Model
from tests.decode.helpers import zeroed
from tests.models import TINY, rigged

V, LENGTH, DEPTH = 4, 4, 3
CFG = replace(TINY, vocab_size=V, num_attention_heads=2, first_k_dense_replace=2, eos_token_ids=())
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top_k": {"temperature": 1.6, "top_k": 3},
    "top_p": {"top_p": 0.9},
    "penalties": {"repetition": 1.5, "frequency": 0.4, "presence": 0.3},
}
ON = xla_cpu(experts="dense")


@dataclass(frozen=True)
class Case:
    """What is drafted with, after which prompt.

    Attributes:
        rows: slots of each option.
        page: cache rows of each slot.
        cfg: the model.
        kept: drafts per slot that a step verifies, the likeliest; None: all.
        reader: a drafter that reads prompts as this one does; None: itself.
        draft_vocab: tokens that drafts choose among; None: all.
    """

    drafter: Drafter
    prompt: tuple[int, ...] = (3, 1, 2)
    rows: int = 1500
    page: int = 16
    cfg: ModelConfig = CFG
    kept: int | None = None
    reader: Drafter | None = None
    draft_vocab: tuple[int, ...] | None = None


PLAIN = Case(build(CFG))


@functools.cache
def params(cfg: ModelConfig = CFG) -> Params:
    return rigged(cfg, seed=2, loud=0.7, noise=0.1, contrast=0.5)


def start(depths: np.ndarray, case: Case) -> State:
    """Every slot with a page of its own."""
    slots = case.rows * len(OPTIONS)
    shape = StateShape(slots, slots, case.page, 1, window=1 + DEPTH)
    state = zeroed(abstract_state(Model(case.cfg), case.drafter, shape))
    sampling = replace(
        neutral_state(slots, V),
        seed=np.arange(slots, dtype=np.uint32),
        prompt_mask=np.tile(np.isin(np.arange(V), case.prompt), (slots, 1)),
        **{
            name: per_row(name, case)
            for name in ("temperature", "top_k", "top_p", "repetition", "frequency", "presence")
        },
    )
    rows = replace(
        state.slots,
        page_table=np.arange(slots, dtype=np.int32)[:, None],
        remaining=np.full(slots, 100, np.int32),
        depth=depths.astype(np.int32),
        suffix=np.ones(slots, bool),
        sampling=sampling,
    )
    return jax.tree.map(jnp.array, replace(state, slots=rows))


def per_row(name: str, case: Case) -> np.ndarray:
    neutral = np.asarray(getattr(neutral_state(1, V), name))
    return np.repeat([o.get(name, neutral[0]) for o in OPTIONS.values()], case.rows).astype(neutral.dtype)


@dataclass(frozen=True)
class Emitted:
    """Of every slot: the first LENGTH tokens, accepted and verified drafts, and those of suffix matches."""

    tokens: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    suffix_accepted: np.ndarray
    suffix_drafted: np.ndarray


def allowed(last: np.ndarray) -> np.ndarray:
    """The packed masks of a grammar in which no token follows itself: last [B, W] -> uint32 [B, W, 1]."""
    return (2**V - 1 - (1 << last))[..., None].astype(np.uint32)


@functools.cache
def _prefill(cfg: ModelConfig, reader: Drafter, mode: SamplingMode) -> Any:
    return jax.jit(Step(Decoding(Model(cfg, ON), reader), StepKey(0, 0, 1, mode)), donate_argnums=1)


def prefill(case: Case, mode: SamplingMode) -> Any:
    """The program that reads the prompts: however drafts are made, and for rejection as for block.

    One that reads for another drafter draws first tokens as for block, too, with numbers of their own.
    """
    coupled = mode.verifier == "coupled" and not case.reader
    like = SamplingMode("sampled", "coupled" if coupled else "block")
    return _prefill(case.cfg, case.reader or case.drafter, like)


@functools.cache
def emitted(drafting: Any, verifier: Any, grammar: bool = False, case: Case = PLAIN) -> Emitted:
    slots = case.rows * len(OPTIONS)

    def full(x: Any, dtype: Any = np.int32) -> np.ndarray:
        return np.full(slots, x, dtype)

    tokens, anything = np.tile(np.array(case.prompt, np.int32), (slots, 1)), np.uint32(2**V - 1)
    each = np.arange(slots, dtype=np.int32)
    first = allowed(tokens[:, -1:])[:, 0] if grammar else np.tile(anything, (slots, 1))
    chunk = Chunk(
        each,
        full(0),
        full(len(case.prompt)),
        full(True, bool),
        tokens,
        np.full_like(tokens, -1),
        full(-1),
        first,
    )
    mode = SamplingMode(drafting, verifier)
    weights, begin = params(case.cfg), prefill(case, mode)
    # Depths 1, 2, 3 and sometimes 0.
    state = start(np.where(np.arange(slots) % 7 == 0, 0, 1 + np.arange(slots) % DEPTH), case)
    state, first = begin(weights, state, chunk)
    if case.draft_vocab:
        weights = with_draft_rows(weights, case.draft_vocab, None)
    columns, counts = [np.asarray(first.packed)[:, :1]], []
    key, ranked = StepKey(slots, DEPTH, 1, mode, kept=case.kept), case.kept is not None
    step = Step(Decoding(Model(case.cfg, ON), case.drafter, margins=ranked), key)
    estimate = np.ones((len(Origin), DEPTH, 2), np.float32) if ranked else None
    whole, *halves = (jax.jit(f, donate_argnums=1) for f in (step, step.draft, step.verify))
    for _ in range(LENGTH - 1):
        if grammar:
            newest = np.array(state.slots.newest)[:, None]
            # What follows the newest token is known, what follows a draft is not.
            known = np.tile(anything, (slots, DEPTH + 1, 1))
            known[:, :1] = allowed(newest)
            state, drafts = halves[0](weights, state, known)
            window = np.concatenate([newest, drafts.tokens], axis=1)
            state, result = halves[1](weights, state, drafts, allowed(window))
        else:
            state, result = whole(weights, state, None, None, estimate)
        packed = np.asarray(result.packed)
        columns.append(packed[:, : DEPTH + 1])
        extra = packed[:, DEPTH + 1 :]
        row = extra[:, [ACCEPTED, DRAFTED]]
        counts.append(np.concatenate([row, row * (extra[:, [SOURCE]] == Origin.SUFFIX)], axis=1))
    everything = np.concatenate(columns, axis=1)
    order = np.argsort(everything < 0, axis=1, kind="stable")  # the emitted ones first, in order
    return Emitted(np.take_along_axis(everything, order, 1)[:, :LENGTH], *np.sum(counts, axis=0).T)


@functools.cache
def next_logits(
    prompt: tuple[int, ...] = PLAIN.prompt, cfg: ModelConfig = CFG
) -> dict[tuple[int, ...], np.ndarray]:
    """Logits after the prompt and every history shorter than LENGTH."""
    rows = np.array([[*prompt, *h] for h in itertools.product(range(V), repeat=LENGTH - 1)], np.int32)
    hidden = jax.jit(lambda p, t: trunk.logits(p, trunk.forward(p, cfg, t)))(params(cfg), rows)
    logits = np.asarray(hidden)
    return {
        tuple(row[len(prompt) : len(prompt) + n].tolist()): out[len(prompt) + n - 1]
        for row, out in zip(rows, logits, strict=True)
        for n in range(LENGTH)
    }


@jax.jit
def next_law(
    logits: jax.Array, s: Any, counts: jax.Array, known: jax.Array, last: jax.Array | None
) -> jax.Array:
    """[N, V]: the law of the next token after histories of ``known`` tokens; none follows ``last``."""
    adjusted = adjust(logits[:, None], s, counts[:, None], known[:, None])
    if last is not None:
        adjusted = adjusted.at[jnp.arange(len(last)), 0, last].set(-jnp.inf)
    return distribution(adjusted, s)[:, 0]


@functools.cache
def exact_law(
    option: str, grammar: bool = False, prompt: tuple[int, ...] = PLAIN.prompt, cfg: ModelConfig = CFG
) -> np.ndarray:
    """[V] * LENGTH: the probability of every continuation."""
    histories = [h for n in range(LENGTH) for h in itertools.product(range(V), repeat=n)]
    following, rows = next_logits(prompt, cfg), len(histories)
    s = neutral_state(rows, V)
    changed = {k: np.full_like(getattr(s, k), v) for k, v in OPTIONS[option].items()}
    s = replace(s, prompt_mask=np.tile(np.isin(np.arange(V), prompt), (rows, 1)), **changed)
    laws = np.asarray(
        next_law(
            np.stack([following[h] for h in histories]),
            s,
            np.stack([np.bincount(np.array(h, int), minlength=V) for h in histories]).astype(np.int32),
            np.array([*map(len, histories)], np.int32),
            np.array([(prompt[-1], *h)[-1] for h in histories]) if grammar else None,
        ),
        np.float64,
    )
    return continuations(laws, V, LENGTH)


def continuations(laws: np.ndarray, size: int, length: int) -> np.ndarray:
    """[size] * length: the probability of every continuation, from laws after all shorter histories."""
    law, begin = np.ones((size,) * length), 0
    for n in range(length):
        law *= laws[begin : begin + size**n].reshape((size,) * (n + 1) + (1,) * (length - n - 1))
        begin += size**n
    return law / law.sum()


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    """The p-value of tokens [N, length] against the law; cells too rare for the test are pooled."""
    seen = np.zeros(law.shape)
    np.add.at(seen, tuple(tokens.T), 1)
    seen, wanted = seen.ravel(), law.ravel() * len(tokens)
    assert not seen[wanted == 0].any(), "a token of probability zero was emitted"
    rare = wanted < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    kept = wanted > 0
    return float(stats.chisquare(seen[kept], wanted[kept] * seen[kept].sum() / wanted[kept].sum()).pvalue)


def fits(got: Emitted, case: Case, grammar: bool = False) -> dict[str, float]:
    """The p-value of each of ``OPTIONS`` against its exact law."""
    assert (got.tokens >= 0).all()
    laws = {option: exact_law(option, grammar, case.prompt, case.cfg) for option in OPTIONS}
    parts = np.split(got.tokens, len(OPTIONS))
    return {option: chi_square(part, laws[option]) for option, part in zip(OPTIONS, parts, strict=True)}


def p_values(
    drafter: Drafter,
    cfg: ModelConfig,
    verifier: str = "rejection",
    grammar: bool = False,
    kept: int | None = None,
    reader: Drafter | None = None,
    draft_vocab: tuple[int, ...] | None = None,
) -> list[float]:
    """Chi-square of whole sampled steps against the exact law, for each of ``OPTIONS``."""
    case = Case(drafter, cfg=cfg, kept=kept, reader=reader, draft_vocab=draft_vocab)
    got = emitted("sampled", verifier, grammar, case)
    assert got.accepted.sum() > 0.2 * got.drafted.sum() > 0
    return [*fits(got, case, grammar).values()]
