"""The draft-and-verify step: one donated, compiled program per (slots, depth, pages) bucket.

    draft    the drafter proposes K tokens after the newest
    verify   the trunk over the window [newest, drafts]: logits and hidden states of W = K + 1 tokens
    accept   the same transforms as plain sampling; the accepted drafts and one corrected or bonus token
    commit   lengths grow, finished slots switch themselves off, the drafter observes the kept tokens

Drafting first lets every step have its own depth: nothing that depends on the depth crosses steps.

What a grammar allows after a draft is known on the host alone, once it has read the draft. A step with such a
row is therefore launched as two programs, ``draft_phase`` and ``verify_phase``; every other step is the two
of them in one.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.decode import verify
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Committed, Drafter, Drafts
from mtp_jax.decode.drafter.sampler import DraftSampler
from mtp_jax.decode.greedy import best_tokens, parts_on
from mtp_jax.decode.keys import Finish, SamplingMode, Topology
from mtp_jax.decode.result import Emitted, StepResult, emit, pack
from mtp_jax.decode.sampling import (
    Purpose,
    SamplingState,
    adjust,
    argmax,
    distribution,
    restrict,
    row_keys,
    top_logprobs,
    window_counts,
)
from mtp_jax.decode.state import DrafterState, Slots, State, first_slots, put_first_slots
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Backend
from mtp_jax.model.visible import chain


def step(
    params: Params,
    state: State,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    slots: int,
    depth: int,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    topology: Topology | None = None,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """Draft ``depth`` tokens for the first ``slots`` slots, verify them, emit 1 to depth + 1 tokens each.

    pages: columns of the page table to look at; must cover every active slot's length + depth + 1 rows.
    topology: of the window; None: the drafter's. accept: stands in for ``accept_drafts`` in measurements.
    Raises ConfigError.
    """
    both = {"cfg": cfg, "drafter": drafter, "pages": pages, "mode": mode, "on": on}
    state, drafts = draft_phase(params, state, None, slots=slots, depth=depth, topology=topology, **both)
    return verify_phase(params, state, drafts, None, accept=accept, **both)


def draft_phase(
    params: Params,
    state: State,
    allowed: UInt32[Array, "B W words"] | None,
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
    """The first half of ``step``. allowed: what grammars allow at each draft, as far as it is known yet."""
    topology = topology or drafter.topology(depth)
    if topology != Topology.chain(depth):
        raise ConfigError(
            f"{topology} at depth {depth}; only chains of drafts, {Topology.chain(depth)}, are verified"
        )
    s, own = first_slots(state.slots, slots), _own(state, slots)
    sampler = DraftSampler(allowed, mode.drafting, coupled=mode.verifier == "coupled")
    by = drafter if depth else Nothing(cfg.vocab_size)
    with jax.named_scope("draft"):
        drafts, after = by.propose(params, own, s, s.page_table[:, :pages], depth, sampler, on)
    return _put_own(state, own, after), drafts.replace(logits=None)


def verify_phase(
    params: Params,
    state: State,
    drafts: Drafts,
    allowed: UInt32[Array, "B W words"] | None,
    *,
    cfg: ModelConfig,
    drafter: Drafter,
    pages: int,
    mode: SamplingMode,
    on: Backend,
    accept: "Accept | None" = None,
) -> tuple[State, StepResult]:
    """The second half. allowed: what grammars allow at every position of the window (see ``restrict``)."""
    s = first_slots(state.slots, len(drafts.tokens))
    table = s.page_table[:, :pages]
    window = jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1)
    with jax.named_scope("verify"):
        traced = _verify(params, cfg, state, s, table, jnp.maximum(window, 0), on)
    with jax.named_scope("accept"):
        verdict, healthy, logits = _accept(
            params, traced.hidden, window, drafts, s, mode, allowed, on, accept
        )
        emitted = emit(verdict, drafts.tokens, s, healthy)
    with jax.named_scope("commit"):
        positions = s.length[:, None] + jnp.arange(window.shape[1])
        positions = jnp.where(jnp.arange(window.shape[1]) < emitted.count[:, None], positions, -1)
        seen = Committed(jnp.maximum(window, 0), positions, features_of(drafter, traced), emitted.count)
        own, defer = _own(state, len(window)), window.shape[1] == 1
        state = _put_own(state, own, drafter.observe(params, own, s, table, seen, on, defer=defer))
        state = state.replace(trunk=traced.caches, slots=put_first_slots(state.slots, _advance(s, emitted)))
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


def features_of(drafter: Drafter, traced: trunk.Traced) -> tuple[Float[Array, "B W D"], ...]:
    """The hidden states that the drafter observes. Raises ConfigError for layers that are not handed on."""
    if any(layer != -1 for layer in drafter.features):
        name, wanted = type(drafter).__name__, drafter.features
        raise ConfigError(f"features = {wanted} of {name}: only -1, the final norm's, is handed on")
    return (traced.hidden,) * len(drafter.features)


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


def _accept(
    params: Params,
    hidden: Float[Array, "B W D"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: UInt32[Array, "B W words"] | None,
    on: Backend,
    accept: "Accept | None",
) -> tuple[verify.Verdict, Bool[Array, "B W"], Float[Array, "B W V"] | None]:
    """Returns (verdict, which logits are finite, the logits if they were computed all at once)."""
    parts = parts_on(on.mesh) if mode == SamplingMode() and accept is None else 1
    if parts > 1:
        ids, healthy = best_tokens(hidden, trunk.head(params), parts)
        return verify.greedy(ids, drafts.tokens, num_drafts(s, drafts)), healthy, None
    logits = trunk.logits(params, hidden)
    verdict = (accept or accept_drafts)(logits, window, drafts, s, mode, allowed)
    return verdict, jnp.isfinite(logits).all(axis=-1), logits


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
    counts = window_counts(s.sampling.counts, window)
    generated = s.generated[:, None] + jnp.arange(window.shape[1])
    target = distribution(adjust(logits, s.sampling, counts, generated, allowed), s.sampling)
    if mode.verifier == "coupled":
        positions = s.length[:, None] + jnp.arange(window.shape[1])
        keys = jax.vmap(row_keys, (None, 1, None), 1)(s.sampling.seed, positions, Purpose.SAMPLE)
        return verify.coupled(keys, target, drafts.tokens, count)
    accept = row_keys(s.sampling.seed, s.length, Purpose.ACCEPT)
    residual = row_keys(s.sampling.seed, s.length, Purpose.RESIDUAL)
    run = verify.block if mode.verifier == "block" else verify.rejection
    return run(accept, residual, target, drafts.probs, drafts.tokens, count)


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
        sampling=count_tokens(s, emitted.tokens),
    )


def count_tokens(s: Slots, tokens: Int[Array, "B W"]) -> SamplingState:
    """The sampling state with the emitted tokens (-1: none) added to the output counts."""
    vocab = s.sampling.counts.shape[1]
    row = jnp.arange(tokens.shape[0])[:, None]
    counts = s.sampling.counts.at[row, jnp.where(tokens < 0, vocab, tokens)].add(1, mode="drop")
    return replace(s.sampling, counts=counts)
