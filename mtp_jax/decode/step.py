"""The step: decode windows, a chunk of prompts, or both, in one donated, compiled program per key.

    draft    the drafter proposes K tokens after the newest
    verify   the trunk and its head over the windows [newest, drafts] and the chunk, side by side: each weight
             is read once
    accept   the same transforms as plain sampling; the accepted drafts and one corrected or bonus token
    commit   lengths grow, finished slots switch themselves off, the drafter observes the kept tokens

Drafting first lets every step have its own depth, as no value that depends on the depth crosses steps.
``decode/windows.py`` and ``decode/prefill.py`` have the two parts, each of which concludes itself.

Only the host knows the tokens that a grammar allows after a draft, once it has read the draft. A step with a
grammar is therefore launched as two programs, ``Step.draft`` and ``Step.verify``, of which the second takes
the chunk; every other step is both in one program.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from mtp_jax.decode import prefill, windows
from mtp_jax.decode.arrays import Chunk
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter, Drafts, features_of, taps_of
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.expert_counts import counted
from mtp_jax.decode.keys import DraftKey, StepKey
from mtp_jax.decode.part import Outputs, Part
from mtp_jax.decode.prefill import Prompts
from mtp_jax.decode.result import StepResult, stack
from mtp_jax.decode.routed import kept
from mtp_jax.decode.state import State, take_slots
from mtp_jax.decode.windows import Windows
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.params import Params
from mtp_jax.model.parts import join, split, split_tree
from mtp_jax.model.sharding import data_size
from mtp_jax.model.trunk import Model, Traced


@dataclass(frozen=True)
class Step:
    """One program: it drafts and verifies for the key's slots, prefills its chunk of prompts, or does both.

    Attributes:
        key: sizes and modes. Its pages must cover every active slot's length + drafts + 1 rows, and the
            chunk's.
    """

    decoding: Decoding
    key: StepKey

    @property
    def model(self) -> Model:
        """The model that verifies."""
        return self.decoding.model

    @property
    def drafter(self) -> Drafter:
        """The drafter that proposes."""
        return self.decoding.drafter

    def __call__(
        self,
        params: Params,
        state: State,
        chunk: Chunk | None = None,
        wanted: Int[Array, ""] | int | None = None,
        estimate: Float[Array, "s K two"] | None = None,
    ) -> tuple[State, StepResult]:
        """Draft, verify, emit 1 to wanted + 1 tokens per slot, and the first token of prompts that end.

        wanted: number of drafts, which must be ``key.depth`` at most; None: ``key.depth``. estimate: slope
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
        coupled, margins = mode.verifier == "coupled", self.decoding.margins
        rules = DraftRules(depth, wanted, allowed, mode.drafting, coupled=coupled, margins=margins)
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
        """The second half. allowed: masks of grammars at each position of the window. Raises ConfigError."""
        parts: list[Part] = []
        if drafts is not None:
            parts.append(self._windows(state, drafts, allowed, estimate, alone=chunk is None))
        if chunk is not None:
            rows = prefill.rows_of(state, chunk, self.key.pages, self.model)
            parts.append(Prompts(self.decoding, self.key, rows, chunk))
        with jax.named_scope("prefill_trunk" if drafts is None else "verify"):
            traced, outputs = self._passed(params, state, parts)
        state, results = state.replace(trunk=traced.caches), []
        if state.experts is not None:
            state = state.replace(experts=counted(state.experts, traced.routing, self.model.on.mesh))
        if state.routed is not None:
            views = tuple(p.rows.view for p in parts)
            state = state.replace(routed=kept(state.routed, traced.routing, views, self.model.on))
        for part, out in zip(parts, outputs, strict=True):
            state, result = part.conclude(params, state, out)
            results.append(result)
        return state, stack(results)

    def _windows(
        self,
        state: State,
        drafts: Drafts,
        allowed: UInt32[Array, "B W words"] | None,
        estimate: Float[Array, "s K two"] | None,
        alone: bool,
    ) -> Windows:
        """The part of the windows, of which some drafts are left out where the key says so."""
        key, packing = self.key, None
        if key.kept is not None:
            chains = drafts.parents is None and drafts.margins is not None
            if estimate is None or not chains or self.decoding.law is not None:
                raise ConfigError(
                    f"{key}: it needs an estimate, a drafter that makes chains with margins, and the verifier"
                )
            shards = data_size(self.model.on.mesh)
            drafts, packing = windows.ranked(state, drafts, estimate, key.kept, shards)
        rows = windows.rows_of(state, drafts, key.pages, packing)
        return Windows(self.decoding, key, rows, drafts, allowed, alone)

    def _passed(self, params: Params, state: State, parts: list[Part]) -> tuple[Traced, list[Outputs]]:
        """One pass of the trunk over the rows of all parts, and its outputs for each."""
        mesh, views = self.model.on.mesh, tuple(p.rows.view for p in parts)
        tokens, positions = (
            join([p.rows.view.packed(getattr(p.rows, of)) for p in parts], mesh)
            for of in ("tokens", "positions")
        )
        wanted = taps_of(self.drafter, self.model.cfg.num_hidden_layers)
        traced = trunk.run(params, self.model, tokens, positions, state.trunk, views, wanted)
        shapes = [view.shape for view in views]
        hidden, taps = split(traced.hidden, shapes, mesh), split_tree(traced.taps, shapes, mesh)
        features = [features_of(self.drafter, h, t) for h, t in zip(hidden, taps, strict=True)]
        return traced, list(map(Outputs, hidden, features, self._logits(params, parts, hidden)))

    def _logits(
        self, params: Params, parts: list[Part], hidden: list[Float[Array, "_B _W D"]]
    ) -> list[Float[Array, "_B _w V"] | None]:
        """Logits of the rows that each part reads, by one product."""
        on = self.model.on
        if all(p.greedy for p in parts) and on.products.head_parts(hidden[0]) > 1:
            return [None] * len(parts)
        scored = [p.scored(h) for p, h in zip(parts, hidden, strict=True)]
        whole = trunk.logits(params, join(scored, on.mesh), on)
        return [*split(whole, [h.shape[:2] for h in scored], on.mesh)]


@dataclass(frozen=True)
class DraftAlone:
    """A program that only drafts, and leaves the state as it is."""

    decoding: Decoding
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
        by, on = self.decoding.drafter, self.decoding.model.on
        drafts, _ = by.propose(params, state.drafter, s, rules, on)
        return drafts.tokens, drafts.logits
