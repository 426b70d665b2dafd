"""The step: decode windows, a chunk of prompts, or both, in one donated, compiled program per key.

    draft    the drafter proposes K tokens after the newest
    verify   the trunk and its head over the windows [newest, drafts] and the chunk, side by side: each weight
             is read once
    accept   the same transforms as plain sampling; the accepted drafts and one corrected or bonus token
    commit   lengths grow, finished slots switch themselves off, the drafter observes the kept tokens

Drafting first lets every step have its own depth: nothing that depends on the depth crosses steps. The part
of a chunk is in ``decode/prefill.py``.

The tokens that a grammar allows after a draft are known on the host alone, once it has read the draft. A step
with such a row is therefore launched as two programs, ``draft_phase`` and ``verify_phase``, of which the
second takes the chunk; every other step is the two of them in one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode import prefill, verify
from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Committed, Drafter, Drafts, features_of
from mtp_jax.decode.drafter.sampler import DraftSampler
from mtp_jax.decode.expert_counts import counted
from mtp_jax.decode.greedy import best_tokens
from mtp_jax.decode.keys import Finish, SamplingMode, Topology
from mtp_jax.decode.result import Emitted, StepResult, emit, pack, stack
from mtp_jax.decode.rows import Rows
from mtp_jax.decode.sampling import (
    Purpose,
    adjust,
    all_finite,
    argmax,
    count_tokens,
    distribution,
    draws,
    likeliest,
    restrict,
    row_keys,
    top_logprobs,
    window_counts,
)
from mtp_jax.decode.state import DrafterState, Slots, State, first_slots, put_first_slots
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.parts import join, split
from mtp_jax.model.trunk import Model
from mtp_jax.model.visible import chain


def step(
    params: Params,
    state: State,
    chunk: Chunk | None = None,
    wanted: Int[Array, ""] | int | None = None,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    slots: int,
    depth: int,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    prompt_logprobs: int | None = None,
    topology: Topology | None = None,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """Draft ``wanted`` tokens for the first ``slots`` slots, verify them, emit 1 to wanted + 1 tokens each.

    Beside them ``chunk`` goes into the cache; a prompt that ends in it emits its first token. One of both may
    be missing: no slots, or no chunk.

    wanted: ``depth`` at most, which windows have room for; None: ``depth``. pages: columns of the page table
    to look at; must cover every active slot's length + wanted + 1 rows, and the chunk's. topology: of the
    window; None: the drafter's. accept: stands in for ``accept_drafts`` in measurements. Raises ConfigError.
    """
    both = {"cfg": cfg, "drafter": drafter, "pages": pages, "mode": mode, "on": on}
    drafts = None
    if slots:
        given = {"slots": slots, "depth": depth, "topology": topology}
        state, drafts = draft_phase(params, state, None, wanted, **given, **both)
    last = {"prompt_logprobs": prompt_logprobs, "accept": accept}
    return verify_phase(params, state, drafts, None, chunk, **last, **both)


def draft_phase(
    params: Params,
    state: State,
    allowed: UInt32[Array, "B W words"] | None,
    wanted: Int[Array, ""] | int | None = None,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    slots: int,
    depth: int,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    topology: Topology | None = None,
) -> tuple[State, Drafts]:
    """The first half of ``step``. allowed: tokens that grammars allow at each draft, as far as known yet."""
    topology, wanted = topology or drafter.topology(depth), depth if wanted is None else wanted
    if topology != Topology.chain(depth):
        raise ConfigError(
            f"{topology} at depth {depth}; only chains of drafts, {Topology.chain(depth)}, are verified"
        )
    s, own = first_slots(state.slots, slots), _own(state, slots)
    sampler = DraftSampler(allowed, mode.drafting, coupled=mode.verifier == "coupled")
    by = drafter if depth else Nothing(cfg.vocab_size)
    with jax.named_scope("draft"):
        drafts, after = by.propose(params, own, s, s.page_table[:, :pages], depth, wanted, sampler, on)
    return _put_own(state, own, after), drafts.replace(logits=None)


def verify_phase(
    params: Params,
    state: State,
    drafts: Drafts | None,
    allowed: UInt32[Array, "B W words"] | None,
    chunk: Chunk | None = None,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    prompt_logprobs: int | None = None,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """The second half. allowed: tokens that grammars allow at each position of the window (``restrict``)."""
    windows = None if drafts is None else _windows(state, drafts, pages)
    prompts = None if chunk is None else prefill.rows(state, chunk, pages, cfg, on)
    parts = [p for p in (windows, prompts) if p]
    with jax.named_scope("verify" if windows else "prefill_trunk"):
        tokens, positions = (join([getattr(p, of) for p in parts], on.mesh) for of in ("tokens", "positions"))
        views = tuple(p.view for p in parts)
        traced = trunk.run(params, Model(cfg, on), tokens, positions, state.trunk, views)
        hidden = split(traced.hidden, [p.tokens.shape for p in parts], on.mesh)
        scored = hidden if chunk is None else [*hidden[:-1], prefill.last_of(hidden[-1], chunk)]
        ids_only = mode == SamplingMode() and chunk is None and accept is None and on.products.head_parts > 1
        logits = [] if ids_only else _logits(params, scored, on)
    state, results = state.replace(trunk=traced.caches), []
    if state.experts is not None:
        state = state.replace(experts=counted(state.experts, traced.routing, on.mesh))
    if windows and drafts is not None:
        given = windows, hidden[0], logits[0] if logits else None, drafts, allowed, drafter, mode, on, accept
        state, result = _conclude(params, state, *given, alone=chunk is None)
        results.append(result)
    if prompts and chunk is not None:
        state, result = prefill.conclude(
            params, state, prompts, hidden[-1], logits[-1], chunk, drafter, mode, on, prompt_logprobs
        )
        results.append(result)
    return state, stack(results)


def _windows(state: State, drafts: Drafts, pages: int) -> Rows:
    """Every slot's newest token and drafts. Drafts past its own depth are padding, as are idle slots."""
    s = first_slots(state.slots, len(drafts.tokens))
    tokens = jnp.maximum(jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1), 0)
    index = jnp.arange(tokens.shape[1])
    count = jnp.where(s.active, num_drafts(s, drafts) + 1, 0)
    positions = s.length[:, None] + index
    written = jnp.where(index < count[:, None], positions, -1)
    return Rows(s, tokens, positions, PagedView(s.page_table[:, :pages], written, chain(s.length, count)))


def _logits(
    params: Params, hidden: list[Float[Array, "_B _W D"]], on: Backend
) -> list[Float[Array, "_B _W V"]]:
    """Logits of every part, by one product."""
    return split(trunk.logits(params, join(hidden, on.mesh), on), [h.shape[:2] for h in hidden], on.mesh)


def _conclude(
    params: Params,
    state: State,
    rows: Rows,
    hidden: Float[Array, "B W D"],
    logits: Float[Array, "B W V"] | None,
    drafts: Drafts,
    allowed: UInt32[Array, "B W words"] | None,
    drafter: Drafter,
    mode: SamplingMode,
    on: Backend,
    accept: "Accept | None",
    *,
    alone: bool,
) -> tuple[State, StepResult]:
    """Accept and commit. logits: None: the likeliest tokens are enough. alone: no chunk comes along."""
    s, width = rows.slots, rows.tokens.shape[1]
    if logits is None:
        with jax.named_scope("verify"):  # the head belongs to the trunk's pass
            ids, healthy = best_tokens(hidden, params.table, on)
        with jax.named_scope("accept"):
            verdict = verify.greedy(ids, drafts.tokens, num_drafts(s, drafts))
    else:
        with jax.named_scope("accept"):
            window = jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1)
            verdict = (accept or accept_drafts)(logits, window, drafts, s, mode, allowed)
            healthy = all_finite(logits)
    with jax.named_scope("accept"):
        emitted = emit(verdict, drafts.tokens, s, healthy)
    with jax.named_scope("commit"):
        positions = jnp.where(jnp.arange(width) < emitted.count[:, None], rows.positions, -1)
        seen = Committed(rows.tokens, positions, features_of(drafter, hidden), emitted.count)
        own, defer = _own(state, len(hidden)), width == 1 and alone
        after = drafter.observe(params, own, s, rows.view.page_table, seen, on, defer=defer)
        state = _put_own(state, own, after)
        state = state.replace(slots=put_first_slots(state.slots, _advance(s, emitted), s))
    accepted, drafted = (jnp.where(s.active, n, 0) for n in (verdict.accepted, num_drafts(s, drafts)))
    top = None
    if mode.logprobs is not None and logits is not None:
        top = top_logprobs(logits, emitted.tokens, mode.logprobs)
    return state, StepResult(pack(emitted, accepted, drafted, drafts.source), top)


def _own(state: State, slots: int) -> DrafterState:
    """The drafter's state of the first slots."""
    return state.drafter.replace(slots=first_slots(state.drafter.slots, slots))


def _put_own(state: State, before: DrafterState, after: DrafterState) -> State:
    slots = put_first_slots(state.drafter.slots, after.slots, before.slots)
    return state.replace(drafter=DrafterState(slots, after.pages))


def num_drafts(s: Slots, drafts: Drafts) -> Int[Array, " B"]:
    """Drafts that each row verifies."""
    return jnp.minimum(s.depth, drafts.count)


def accept_drafts(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: UInt32[Array, "B W words"] | None,
) -> verify.Verdict:
    """Which drafts each row keeps, and the token after them."""
    count = num_drafts(s, drafts)
    if drafts.probs is None:
        return verify.greedy(argmax(restrict(logits, allowed)), drafts.tokens, count)
    counts, index = window_counts(s.sampling.counts, window), jnp.arange(window.shape[1])
    generated = s.generated[:, None] + index
    adjusted, probs = adjust(logits, s.sampling, counts, generated, allowed), drafts.probs

    def sampled() -> verify.Verdict:
        target = distribution(adjusted, s.sampling)
        if mode.verifier == "coupled":
            positions = s.length[:, None] + index
            keys = jax.vmap(row_keys, (None, 1, None), 1)(s.sampling.seed, positions, Purpose.SAMPLE)
            return verify.coupled(keys, target, drafts.tokens, count)
        accept = row_keys(s.sampling.seed, s.length, Purpose.ACCEPT)
        residual = row_keys(s.sampling.seed, s.length, Purpose.RESIDUAL)
        run = verify.block if mode.verifier == "block" else verify.rejection
        return run(accept, residual, target, probs, drafts.tokens, count)

    def likely() -> verify.Verdict:
        return verify.greedy(likeliest(adjusted), drafts.tokens, count)

    return jax.lax.cond(draws(s.sampling), sampled, likely)


Accept = Callable[..., verify.Verdict]
"""A function with the signature of ``accept_drafts``."""


def _advance(s: Slots, emitted: Emitted) -> Slots:
    """Commit: rows up to the new length are now part of the sequence."""
    some = emitted.count > 0
    last = jnp.maximum(emitted.count - 1, 0)
    newest = jnp.take_along_axis(emitted.tokens, last[:, None], axis=1)[:, 0]
    return s.replace(
        length=s.length + emitted.count,
        newest=jnp.where(some, newest, s.newest),
        active=s.active & (emitted.finish == Finish.RUNNING),
        remaining=s.remaining - emitted.count,
        generated=s.generated + emitted.count,
        sampling=count_tokens(s.sampling, emitted.tokens),
    )
