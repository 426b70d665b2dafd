"""The draft-and-verify step: one donated, compiled program per (slots, depth, pages) bucket.

    draft    K recursive NextN passes from the newest token
    verify   the trunk over the window [newest, drafts]: logits and hidden states of W = K + 1 tokens
    accept   the same transforms as plain sampling; the accepted drafts and one corrected or bonus token
    commit   lengths grow, finished slots switch themselves off, NextN rows of the kept tokens are written,
             or put off if there are no drafts

Drafting first lets every step have its own depth: nothing that depends on the depth crosses steps.

What a grammar allows after a draft is known on the host alone, once it has read the draft. A step with such a
row is therefore launched as two programs, ``draft_phase`` and ``verify_phase``; every other step is the two
of them in one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.decode import verify
from mtp_jax.decode.backlog import put_off
from mtp_jax.decode.draft import Drafts, draft, extend
from mtp_jax.decode.greedy import best_tokens, parts_on
from mtp_jax.decode.keys import Finish, SamplingMode
from mtp_jax.decode.sampling import (
    Purpose,
    SamplingState,
    TopLogprobs,
    adjust,
    argmax,
    distribution,
    restrict,
    row_keys,
    top_logprobs,
    window_counts,
)
from mtp_jax.decode.state import Slots, State, first_slots, put_first_slots
from mtp_jax.model import trunk
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend
from mtp_jax.model.visible import chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What the host reads, one step late.

    Attributes:
        packed: int32 [B, W + 4]: emitted tokens (-1 past the end), their count, accepted drafts, verified
            drafts, ``Finish``. One array, because one copy is cheaper than several.
        logprobs: of the emitted tokens, if the step computes them.
    """

    packed: Int[Array, "B C"]
    logprobs: TopLogprobs | None


def step(
    params: Params,
    state: State,
    *,
    cfg: ModelConfig,
    slots: int,
    depth: int,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """Draft ``depth`` tokens for the first ``slots`` slots, verify them, emit 1 to depth + 1 tokens each.

    pages: columns of the page table to look at; must cover every active slot's length + depth + 1 rows.
    accept: stands in for ``accept_drafts`` in measurements.
    """
    state, drafts = draft_phase(
        params, state, None, cfg=cfg, slots=slots, depth=depth, pages=pages, mode=mode, on=on
    )
    return verify_phase(params, state, drafts, None, cfg=cfg, pages=pages, mode=mode, on=on, accept=accept)


def draft_phase(
    params: Params,
    state: State,
    allowed: UInt32[Array, "B W words"] | None,
    *,
    cfg: ModelConfig,
    slots: int,
    depth: int,
    pages: int,
    mode: SamplingMode,
    on: Backend,
) -> tuple[State, Drafts]:
    """The first half of ``step``. allowed: what grammars allow at each draft, as far as it is known yet."""
    s = first_slots(state.slots, slots)
    if not depth:
        return state, _no_drafts(cfg, slots, mode)
    with jax.named_scope("draft"):
        drafts, nextn_pages = draft(
            params,
            cfg,
            state,
            s,
            s.page_table[:, :pages],
            depth,
            mode.drafting,
            on,
            allowed,
            coupled=mode.verifier == "coupled",
        )
    return replace(state, nextn=nextn_pages), replace(drafts, logits=None)


def verify_phase(
    params: Params,
    state: State,
    drafts: Drafts,
    allowed: UInt32[Array, "B W words"] | None,
    *,
    cfg: ModelConfig,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """The second half. allowed: what grammars allow at every position of the window (see ``restrict``)."""
    slots, depth = drafts.tokens.shape
    s = first_slots(state.slots, slots)
    table = s.page_table[:, :pages]
    with jax.named_scope("verify"):
        window = jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1)
        traced = _verify(params, cfg, state, s, table, jnp.maximum(window, 0), on)
    parts = parts_on(on.mesh) if mode == SamplingMode() and accept is None else 1
    logits = trunk.logits(params, traced.hidden) if parts == 1 else None
    with jax.named_scope("accept"):
        if logits is None:
            ids, healthy = best_tokens(traced.hidden, trunk.head(params), parts)
            verdict = verify.greedy(ids, drafts.tokens, jnp.minimum(s.depth, depth))
        else:
            healthy = jnp.isfinite(logits).all(axis=-1)
            verdict = (accept or accept_drafts)(logits, window, drafts, s, mode, allowed)
        emitted = _emit(verdict, drafts.tokens, s, healthy)
    with jax.named_scope("commit"):
        kept, carry = _keep(params, cfg, state, s, table, window, traced.hidden, emitted.count, on)
        slots_after = put_first_slots(state.slots, _advance(s, emitted, carry))
    num_drafts = jnp.where(s.active, jnp.minimum(s.depth, depth), 0)
    counts = (emitted.count, jnp.where(s.active, verdict.accepted, 0), num_drafts, emitted.finish)
    tokens = emitted.tokens
    packed = jnp.concatenate([tokens, jnp.stack(counts, axis=1)], axis=1)
    top = None if mode.logprobs is None or logits is None else top_logprobs(logits, tokens, mode.logprobs)
    return replace(kept, trunk=traced.caches, slots=slots_after), StepResult(packed, top)


def _no_drafts(cfg: ModelConfig, slots: int, mode: SamplingMode) -> Drafts:
    nothing = jnp.zeros((slots, 0, cfg.vocab_size), jnp.float32)
    return Drafts(jnp.zeros((slots, 0), jnp.int32), None, None if mode.drafting is None else nothing)


def _verify(
    params: Params,
    cfg: ModelConfig,
    state: State,
    s: Slots,
    table: Int[Array, "B n"],
    window: Int[Array, "B W"],
    on: Backend,
) -> trunk.Traced:
    width = window.shape[1]
    positions = s.length[:, None] + jnp.arange(width)
    written = jnp.where(s.active[:, None], positions, -1)
    view = PagedView(table, written, chain(s.length, jnp.where(s.active, width, 0)))
    return trunk.run(params, cfg, window, positions, state.trunk, view, on)


def accept_drafts(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: UInt32[Array, "B W words"] | None,
) -> verify.Verdict:
    """Which drafts each row keeps, and the token after them."""
    num_drafts = jnp.minimum(s.depth, drafts.tokens.shape[1])
    if drafts.probs is None:
        return verify.greedy(argmax(restrict(logits, allowed)), drafts.tokens, num_drafts)
    counts = window_counts(s.sampling.counts, window)
    generated = s.generated[:, None] + jnp.arange(window.shape[1])
    target = distribution(adjust(logits, s.sampling, counts, generated, allowed), s.sampling)
    if mode.verifier == "coupled":
        positions = s.length[:, None] + jnp.arange(window.shape[1])
        keys = jax.vmap(row_keys, (None, 1, None), 1)(s.sampling.seed, positions, Purpose.SAMPLE)
        return verify.coupled(keys, target, drafts.tokens, num_drafts)
    accept = row_keys(s.sampling.seed, s.length, Purpose.ACCEPT)
    residual = row_keys(s.sampling.seed, s.length, Purpose.RESIDUAL)
    run = verify.block if mode.verifier == "block" else verify.rejection
    return run(accept, residual, target, drafts.probs, drafts.tokens, num_drafts)


Accept = Callable[..., verify.Verdict]
"""Something called as ``accept_drafts`` is."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """Tokens that reach the output (-1 past the end), their count, and why the slot ends, if it does."""

    tokens: Int[Array, "B W"]
    count: Int[Array, " B"]
    finish: Int[Array, " B"]


def _emit(
    verdict: verify.Verdict, drafts: Int[Array, "B K"], s: Slots, healthy: Bool[Array, "B W"]
) -> Emitted:
    """Cut the accepted tokens at the first stop token, at max_tokens, and before the first NaN."""
    width = drafts.shape[1] + 1
    index = jnp.arange(width)
    accepted = verdict.accepted[:, None]
    tokens = jnp.where(index < accepted, jnp.pad(drafts, ((0, 0), (0, 1))), verdict.token[:, None])
    safe = jnp.maximum(tokens, 0)
    stops = jnp.take_along_axis(s.sampling.stop_mask, safe, axis=1)
    proposed = index <= accepted
    broken = proposed & (~healthy | (tokens < 0))
    first_stop, first_broken = _first(stops & proposed), _first(broken)
    count = jnp.minimum(jnp.minimum(verdict.accepted, first_stop) + 1, jnp.minimum(s.remaining, first_broken))
    count = jnp.where(s.active, count, 0)
    finish = jnp.select(
        [~s.active, first_stop < count, count == s.remaining, first_broken <= count],
        [Finish.RUNNING, Finish.STOP, Finish.LENGTH, Finish.NAN],
        Finish.RUNNING,
    ).astype(jnp.int32)
    return Emitted(jnp.where(index < count[:, None], tokens, -1), count, finish)


def _first(flags: Bool[Array, "B W"]) -> Int[Array, " B"]:
    """Index of the first true flag of each row; past the end if there is none."""
    return jnp.where(flags.any(axis=1), jnp.argmax(flags, axis=1), flags.shape[1] + 1)


def _keep(
    params: Params,
    cfg: ModelConfig,
    state: State,
    s: Slots,
    table: Int[Array, "B n"],
    window: Int[Array, "B W"],
    hidden: Float[Array, "B W D"],
    count: Int[Array, " B"],
    on: Backend,
) -> tuple[State, Float[Array, "B k D"]]:
    """Commit: the NextN rows of the first ``count`` tokens of each window, put off if it has no drafts.

    Returns (state, carry).
    """
    if window.shape[1] == 1:
        own = put_off(first_slots(state.backlog, len(window)), window[:, 0], hidden[:, 0], count)
        return replace(state, backlog=put_first_slots(state.backlog, own)), s.carry
    index = jnp.arange(window.shape[1])
    positions = jnp.where(index < count[:, None], s.length[:, None] + index, -1)
    tokens = jnp.maximum(window, 0)
    extension = extend(params, cfg, state.nextn, state.tails, table, tokens, positions, hidden, s.carry, on)
    return replace(state, nextn=extension.pages, tails=extension.tails), extension.carry(count, s.carry)


def _advance(s: Slots, emitted: Emitted, carry: Float[Array, "B k D"]) -> Slots:
    """Commit: rows up to the new length are now part of the sequence."""
    some = emitted.count > 0
    last = jnp.maximum(emitted.count - 1, 0)
    newest = jnp.take_along_axis(emitted.tokens, last[:, None], axis=1)[:, 0]
    return replace(
        s,
        length=s.length + emitted.count,
        newest=jnp.where(some, newest, s.newest),
        active=s.active & (emitted.finish == Finish.RUNNING),
        remaining=s.remaining - emitted.count,
        generated=s.generated + emitted.count,
        carry=carry,
        sampling=count_tokens(s, emitted.tokens),
    )


def count_tokens(s: Slots, tokens: Int[Array, "B W"]) -> SamplingState:
    """The sampling state with the emitted tokens (-1: none) added to the output counts."""
    vocab = s.sampling.counts.shape[1]
    row = jnp.arange(tokens.shape[0])[:, None]
    counts = s.sampling.counts.at[row, jnp.where(tokens < 0, vocab, tokens)].add(1, mode="drop")
    return replace(s.sampling, counts=counts)
