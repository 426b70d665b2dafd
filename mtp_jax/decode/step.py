"""The step: decode windows, a chunk of prompts, or both, in one donated, compiled program per key.

    draft    the drafter proposes K tokens after the newest
    verify   the trunk and its head over the windows [newest, drafts] and the chunk, side by side: each weight
             is read once
    accept   the same transforms as plain sampling; the accepted drafts and one corrected or bonus token
    commit   lengths grow, finished slots switch themselves off, the drafter observes the kept tokens

Drafting first lets every step have its own depth, as no value that depends on the depth crosses steps.
``decode/prefill.py`` has the functions of the chunk.

Only the host knows the tokens that a grammar allows after a draft, once it has read the draft. A step with a
grammar is therefore launched as two programs, ``Step.draft`` and ``Step.verify``, of which the second takes
the chunk; every other step is both in one program.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.decode import forced, prefill, ranking, verify
from mtp_jax.decode.arrays import Chunk, TopLogprobs
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Committed, Drafter, Drafts, Features, features_of, taps_of
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.expert_counts import counted
from mtp_jax.decode.greedy import best_tokens
from mtp_jax.decode.keys import DraftKey, Finish, SamplingMode, StepKey
from mtp_jax.decode.law import Law
from mtp_jax.decode.part import StepPart
from mtp_jax.decode.result import Emitted, StepResult, emit, pack, stack
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
from mtp_jax.decode.state import Slots, State, put_slots, take_slots
from mtp_jax.decode.tree import along
from mtp_jax.decode.verify import Verdict
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.cache import PagedView
from mtp_jax.model.params import Params
from mtp_jax.model.parts import Packing, join, split, split_tree
from mtp_jax.model.sharding import data_size
from mtp_jax.model.trunk import Model
from mtp_jax.model.visible import chain


def num_drafts(s: Slots, drafts: Drafts) -> Int[Array, " B"]:
    """The number of drafts that each row verifies."""
    return jnp.minimum(s.depth, drafts.count)


def accept_drafts(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    allowed: UInt32[Array, "B W words"] | None,
) -> Verdict:
    """Which drafts each row keeps, and the token after them. Raises ConfigError."""
    count = num_drafts(s, drafts)
    if mode.drafting is None:
        return verify.greedy(argmax(restrict(logits, allowed)), drafts.tokens, count, drafts.parents)
    if drafts.parents is not None and mode.verifier != "coupled":
        raise ConfigError(
            f"verifier = {mode.verifier!r} for a tree of drafts; sampled trees are verified by 'coupled'"
        )
    counts = window_counts(s.sampling.counts, window, lineage=drafts.lineage)
    generated = s.generated[:, None] + drafts.steps
    adjusted, probs = adjust(logits, s.sampling, counts, generated, allowed), drafts.probs

    def sampled() -> Verdict:
        target = distribution(adjusted, s.sampling)
        if mode.verifier == "coupled" or probs is None:
            positions = s.length[:, None] + drafts.steps
            keys = jax.vmap(row_keys, (None, 1, None), 1)(s.sampling.seed, positions, Purpose.SAMPLE)
            return verify.coupled(keys, target, drafts.tokens, count, drafts.parents)
        accept = row_keys(s.sampling.seed, s.length, Purpose.ACCEPT)
        residual = row_keys(s.sampling.seed, s.length, Purpose.RESIDUAL)
        run = verify.block if mode.verifier == "block" else verify.rejection
        return run(accept, residual, target, probs, drafts.tokens, count)

    def likely() -> Verdict:
        return verify.greedy(likeliest(adjusted), drafts.tokens, count, drafts.parents)

    return jax.lax.cond(draws(s.sampling), sampled, likely)


def _token_after(
    logits: Float[Array, "B W V"],
    window: Int[Array, "B W"],
    drafts: Drafts,
    s: Slots,
    mode: SamplingMode,
    kept: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The target's own token after the first ``kept`` drafts, as a step without drafts chooses it there."""
    at, told = kept[:, None], jnp.arange(drafts.tokens.shape[1])
    counted = count_tokens(s.sampling, jnp.where(told < at, drafts.tokens, -1))
    there = s.replace(length=s.length + kept, generated=s.generated + kept, sampling=counted)
    none = drafts.replace(
        tokens=drafts.tokens[:, :0],
        count=jnp.zeros_like(kept),
        probs=None if drafts.probs is None else drafts.probs[:, :0],
    )
    row = jnp.take_along_axis(logits, at[..., None], axis=1)
    return accept_drafts(row, jnp.take_along_axis(window, at, axis=1), none, there, mode, None).token


@dataclass(frozen=True)
class Step:
    """One program: it drafts and verifies for the key's slots, prefills its chunk of prompts, or does both.

    Attributes:
        key: sizes and modes. Its pages must cover every active slot's length + drafts + 1 rows, and the
            chunk's.
        law: says how many drafts stay, in the verifier's place, for benchmarks; None: the verifier does.
        margins: whether results have the margins of drafts.
    """

    model: Model
    drafter: Drafter
    key: StepKey
    law: Law | None = None
    margins: bool = False

    def __call__(
        self,
        params: Params,
        state: State,
        chunk: Chunk | None = None,
        wanted: Int[Array, ""] | int | None = None,
        estimate: Float[Array, "s K two"] | None = None,
    ) -> tuple[State, StepResult]:
        """Draft, verify, emit 1 to wanted + 1 tokens per slot, and the first token of prompts that end.

        wanted: number of drafts, ``key.depth`` at most; None: ``key.depth``. estimate: slope
        and bias for ``ranking.survival``, where ``key.kept`` is set. Raises ConfigError.
        """
        state, drafts = self.draft(params, state, None, wanted) if self.key.slots else (state, None)
        return self.verify(params, state, drafts, None, chunk, estimate)

    def draft(
        self,
        params: Params,
        state: State,
        allowed: UInt32[Array, "B W words"] | None,
        wanted: Int[Array, ""] | int | None = None,
    ) -> tuple[State, Drafts]:
        """The first half. allowed: masks of grammars at each draft, where known before drafting."""
        key, mode, depth = self.key, self.key.mode, self.key.room
        s, own = take_slots(state.slots, key.slots), state.drafter.of(key.slots)
        s = s.replace(page_table=s.page_table[:, : key.pages])
        wanted = depth if wanted is None else wanted
        coupled = mode.verifier == "coupled"
        rules = DraftRules(depth, wanted, allowed, mode.drafting, coupled=coupled, margins=self.margins)
        by = self.drafter if depth else Nothing(self.model.cfg.vocab_size)
        with jax.named_scope("draft"):
            drafts, after = by.propose(params, own, s, rules, self.model.on)
        return state.replace(drafter=state.drafter.put(key.slots, after, own)), drafts.replace(logits=None)

    def verify(
        self,
        params: Params,
        state: State,
        drafts: Drafts | None,
        allowed: UInt32[Array, "B W words"] | None,
        chunk: Chunk | None = None,
        estimate: Float[Array, "s K two"] | None = None,
    ) -> tuple[State, StepResult]:
        """The second half. allowed: masks of grammars at each position of the window."""
        pages, on, packing = self.key.pages, self.model.on, None
        if drafts is not None and self.key.kept is not None:
            drafts, packing = self._ranked(state, drafts, estimate)
        windows = None if drafts is None else _windows(state, drafts, pages, packing)
        prompts = None if chunk is None else prefill.part(state, chunk, pages, self.model)
        parts = [p for p in (windows, prompts) if p]
        with jax.named_scope("verify" if windows else "prefill_trunk"):
            tokens, positions = (
                join([p.view.packed(getattr(p, of)) for p in parts], on.mesh)
                for of in ("tokens", "positions")
            )
            views, shapes = tuple(p.view for p in parts), [p.view.shape for p in parts]
            wanted = taps_of(self.drafter, self.model.cfg.num_hidden_layers)
            traced = trunk.run(params, self.model, tokens, positions, state.trunk, views, wanted)
            hidden, taps = split(traced.hidden, shapes, on.mesh), split_tree(traced.taps, shapes, on.mesh)
            features = [features_of(self.drafter, h, t) for h, t in zip(hidden, taps, strict=True)]
            scored = hidden if chunk is None else [*hidden[:-1], prefill.last_of(hidden[-1], chunk)]
            plain = self.key.mode == SamplingMode() and chunk is None
            logits = [] if plain and on.products.head_parts(hidden[0]) > 1 else self._logits(params, scored)
        state, results = state.replace(trunk=traced.caches), []
        if state.experts is not None:
            state = state.replace(experts=counted(state.experts, traced.routing, on.mesh))
        if windows and drafts is not None:
            s, view = windows.slots, windows.view
            scores = view.unpacked(logits[0]) if logits else None
            verdict, healthy = self._judged(params, windows, hidden[0], scores, drafts, allowed)
            with jax.named_scope("accept"):
                emitted = emit(verdict, drafts.tokens, s, healthy)
            with jax.named_scope("commit"):
                defer = windows.tokens.shape[1] == 1 and chunk is None
                after, observed = _advance(s, emitted), view.unpacked(features[0])
                if verdict.path is not None:
                    state, windows = self._moved(state, windows, verdict.path, emitted.count)
                    observed = tuple(along(verdict.path, x) for x in observed)
                state = self._commit(params, state, windows, observed, emitted.count, after, defer)
            accepted, drafted = (jnp.where(s.active, n, 0) for n in (verdict.accepted, num_drafts(s, drafts)))
            packed = pack(emitted, accepted, drafted, drafts.source)
            scores = None if scores is None else along(verdict.path, scores)
            margins = drafts.margins if self.key.room else None
            results.append(StepResult(packed, self._top(scores, emitted), margins=margins))
        if prompts and chunk is not None:
            with jax.named_scope("first_token"):
                after, emitted = prefill.first_tokens(prompts, hidden[-1], logits[-1], chunk)
            with jax.named_scope("prefill_drafter"):
                state = self._commit(params, state, prompts, features[-1], chunk.count, after)
            none, count = jnp.zeros_like(emitted.count), self.key.prompt_logprobs
            asked = None if count is None else prefill.scores(params, hidden[-1], chunk, on, count)
            packed = pack(emitted, none, none, none)
            results.append(StepResult(packed, self._top(logits[-1], emitted), asked))
        return state, stack(results)

    def _logits(self, params: Params, hidden: list[Float[Array, "_B _W D"]]) -> list[Float[Array, "_B _W V"]]:
        """Logits of the windows and of the chunk, by one product."""
        on = self.model.on
        whole = trunk.logits(params, join(hidden, on.mesh), on)
        return split(whole, [h.shape[:2] for h in hidden], on.mesh)

    def _ranked(
        self, state: State, drafts: Drafts, estimate: Float[Array, "s K two"] | None
    ) -> tuple[Drafts, Packing]:
        """The drafts that are verified, where that is not all of them."""
        key, shards = self.key, data_size(self.model.on.mesh)
        if estimate is None or drafts.parents is not None or self.law is not None:
            raise ConfigError(f"{key}: it needs an estimate, a drafter that makes chains, and the verifier")
        with jax.named_scope("rank"):
            s = take_slots(state.slots, key.slots)
            return ranking.likeliest(drafts, s, estimate, (key.kept or 0) * key.slots // shards, shards)

    def _judged(
        self,
        params: Params,
        part: StepPart,
        hidden: Float[Array, "_B _W D"],
        logits: Float[Array, "B W V"] | None,
        drafts: Drafts,
        allowed: UInt32[Array, "B W words"] | None,
    ) -> tuple[Verdict, Bool[Array, "B W"]]:
        """The verdict, and whether logits are finite.

        hidden: hidden states of the pass's rows. logits: None where the likeliest tokens are enough.
        """
        s, count = part.slots, num_drafts(part.slots, drafts)
        if self.law is not None and drafts.parents is not None:
            raise ConfigError("synthetic acceptance keeps drafts of chains; this drafter makes trees")
        if logits is None:
            with jax.named_scope("verify"):  # the head belongs to the trunk's pass
                ids, healthy = part.view.unpacked(best_tokens(hidden, params.table, self.model.on))
            with jax.named_scope("accept"):
                verdict = verify.greedy(ids, drafts.tokens, count, drafts.parents)
                if self.law is not None:
                    kept = forced.kept(self.law, s, drafts.tokens, count)
                    token = jnp.take_along_axis(ids, kept[:, None], axis=1)[:, 0]
                    verdict = forced.instead(verdict, Verdict(kept, token))
                return verdict, healthy
        with jax.named_scope("accept"):
            window, mode = jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1), self.key.mode
            verdict = accept_drafts(logits, window, drafts, s, mode, allowed)
            if self.law is not None:
                kept = forced.kept(self.law, s, drafts.tokens, count)
                token = _token_after(logits, window, drafts, s, mode, kept)
                verdict = forced.instead(verdict, Verdict(kept, token))
            return verdict, all_finite(logits)

    def _moved(
        self, state: State, part: StepPart, path: Int[Array, "B W"], count: Int[Array, " B"]
    ) -> tuple[State, StepPart]:
        """The first ``count`` nodes of a tree's path as a chain: in the trunk's caches, and as rows."""
        index, length = jnp.arange(path.shape[1]), part.slots.length[:, None]
        target = jnp.where((index < count[:, None]) & (path != index), length + index, -1)
        caches = trunk.moved(state.trunk, self.model.on, part.view.page_table, length + path, target)
        part = part._replace(tokens=along(path, part.tokens), positions=length + index)
        return state.replace(trunk=caches), part

    def _commit(
        self,
        params: Params,
        state: State,
        part: StepPart,
        features: Features,
        count: Int[Array, " _B"],
        after: Slots,
        defer: bool = False,
    ) -> State:
        """The state in which the first ``count`` tokens of each row belong to its sequence."""
        view, own = part.view, state.drafter.of(part.which)
        positions = jnp.where(jnp.arange(part.tokens.shape[1]) < count[:, None], part.positions, -1)
        seen = Committed(part.tokens, positions, features, count, view.page_table, view.form, defer)
        told = self.drafter.observe(params, own, seen, self.model.on)
        slots = put_slots(state.slots, part.which, after, part.slots)
        return state.replace(slots=slots, drafter=state.drafter.put(part.which, told, own))

    def _top(self, logits: Float[Array, "_B _W V"] | None, emitted: Emitted) -> TopLogprobs | None:
        """Log-probabilities of the emitted tokens, where the mode has any."""
        count = self.key.mode.logprobs
        return None if count is None or logits is None else top_logprobs(logits, emitted.tokens, count)


@dataclass(frozen=True)
class DraftAlone:
    """A program that only drafts, and leaves the state as it is."""

    model: Model
    drafter: Drafter
    key: DraftKey

    def __call__(
        self, params: Params, state: State, slot: Int[Array, ""]
    ) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None]:
        """(Drafts, logits behind them), with a row per slot, of which only ``slot``'s has a meaning."""
        s, depth = state.slots, self.key.depth
        s = s.replace(
            active=jnp.arange(len(s.active)) == slot,
            depth=jnp.full_like(s.depth, depth),
            page_table=s.page_table[:, : self.key.pages],
        )
        rules = DraftRules(depth, jnp.int32(depth), logits=True)
        drafts, _ = self.drafter.propose(params, state.drafter, s, rules, self.model.on)
        return drafts.tokens, drafts.logits


def _windows(state: State, drafts: Drafts, pages: int, packing: Packing | None = None) -> StepPart:
    """Every slot's newest token and drafts. Drafts past its own depth are padding, as are idle slots."""
    which = len(drafts.tokens)
    s = take_slots(state.slots, which)
    tokens = jnp.maximum(jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1), 0)
    index = jnp.arange(tokens.shape[1])
    count = jnp.where(s.active, num_drafts(s, drafts) + 1, 0)
    written = jnp.where(index < count[:, None], s.length[:, None] + index, -1)
    visible = replace(chain(s.length, count), ancestors=drafts.lineage)
    view = PagedView(s.page_table[:, :pages], written, visible, packing=packing, slot=jnp.arange(which))
    return StepPart(which, s, tokens, s.length[:, None] + drafts.steps, view)


def _advance(s: Slots, emitted: Emitted) -> Slots:
    """Commit the emitted tokens: rows up to the new length are part of the sequence now."""
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
