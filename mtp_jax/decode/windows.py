"""The windows of a step: the rows of every slot's newest token and drafts, and the tokens that they emit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mtp_jax.decode import forced, ranking, verify
from mtp_jax.decode.accept import accept_drafts, num_drafts, token_after
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.greedy import best_tokens
from mtp_jax.decode.keys import Finish, SamplingMode
from mtp_jax.decode.part import Outputs, Part, PartRows
from mtp_jax.decode.result import Emitted, StepResult, emit, pack
from mtp_jax.decode.sampling import all_finite, count_tokens
from mtp_jax.decode.state import Slots, State, take_slots
from mtp_jax.decode.tree import along
from mtp_jax.decode.verify import Verdict
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.cache import PagedView
from mtp_jax.model.params import Params
from mtp_jax.model.parts import Packing
from mtp_jax.model.visible import chain


@dataclass(frozen=True)
class Windows(Part):
    """The windows of a step.

    Attributes:
        drafts: the drafts of the step, ``count`` of which are verified in each row.
        allowed: masks of grammars at each position of the window; None: any token.
        alone: whether no chunk is beside the windows.
    """

    drafts: Drafts
    allowed: UInt32[Array, "B W words"] | None
    alone: bool

    @property
    def greedy(self) -> bool:
        """Greedy rows, unadjusted and without log-probabilities, need no more."""
        return self.key.mode == SamplingMode()

    def scored(self, hidden: Float[Array, "_B _W D"]) -> Float[Array, "_B _W D"]:
        """All rows."""
        return hidden

    def conclude(self, params: Params, state: State, out: Outputs) -> tuple[State, StepResult]:
        """Keep the drafts that the verdict says, and the token after them. Raises ConfigError."""
        rows, drafts, s = self.rows, self.drafts, self.rows.slots
        logits = None if out.logits is None else rows.view.unpacked(out.logits)
        verdict, healthy = self.judged(params, out.hidden, logits)
        with jax.named_scope("accept"):
            emitted = emit(verdict, drafts.tokens, s, healthy)
        with jax.named_scope("commit"):
            after, observed = _advance(s, emitted), rows.view.unpacked(out.features)
            if verdict.path is not None:
                state, rows = self._moved(state, verdict.path, emitted.count)
                observed = tuple(along(verdict.path, x) for x in observed)
            defer = self.alone and rows.tokens.shape[1] == 1
            state = self.commit(params, state, rows.committed(observed, emitted.count, defer), after)
        accepted, drafted = (jnp.where(s.active, n, 0) for n in (verdict.accepted, num_drafts(s, drafts)))
        packed = pack(emitted, accepted, drafted, drafts.source)
        logits = None if logits is None else along(verdict.path, logits)
        margins = drafts.margins if self.key.room else None
        return state, StepResult(packed, self.top(logits, emitted), margins=margins)

    def judged(
        self, params: Params, hidden: Float[Array, "_B _W D"], logits: Float[Array, "B W V"] | None
    ) -> tuple[Verdict, Bool[Array, "B W"]]:
        """The verdict, and whether logits are finite. Raises ConfigError.

        hidden: hidden states of the pass's rows. logits: None where the likeliest tokens are enough.
        """
        s, drafts, mode = self.rows.slots, self.drafts, self.key.mode
        count, on = num_drafts(s, drafts), self.decoding.model.on
        if self.decoding.law is not None and drafts.parents is not None:
            raise ConfigError("synthetic acceptance keeps drafts of chains; this drafter makes trees")
        if logits is None:
            with jax.named_scope("verify"):  # the head belongs to the trunk's pass
                ids, healthy = self.rows.view.unpacked(best_tokens(hidden, params.table, on))
            with jax.named_scope("accept"):
                verdict = verify.greedy(ids, drafts.tokens, count, drafts.parents)
                return self._forced(verdict, count, lambda kept: along(kept[:, None], ids)[:, 0]), healthy
        with jax.named_scope("accept"):
            window = jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1)
            verdict = accept_drafts(logits, window, drafts, s, mode, self.allowed)
            verdict = self._forced(
                verdict, count, lambda kept: token_after(logits, window, drafts, s, mode, kept)
            )
            return verdict, all_finite(logits)

    def _forced(
        self, real: Verdict, count: Int[Array, " B"], after: Callable[[Int[Array, " B"]], Int[Array, " B"]]
    ) -> Verdict:
        """The law's verdict, where there is one. after: the target's token after the kept drafts."""
        if self.decoding.law is None:
            return real
        kept = forced.kept(self.decoding.law, self.rows.slots, self.drafts.tokens, count)
        return forced.instead(real, Verdict(kept, after(kept)))

    def _moved(
        self, state: State, path: Int[Array, "B W"], count: Int[Array, " B"]
    ) -> tuple[State, PartRows]:
        """The first ``count`` nodes of a tree's path as a chain: in the trunk's caches, and as rows."""
        rows, index, length = self.rows, jnp.arange(path.shape[1]), self.rows.slots.length[:, None]
        target = jnp.where((index < count[:, None]) & (path != index), length + index, -1)
        table, on = rows.view.page_table, self.decoding.model.on
        caches, routed = trunk.moved(state.trunk, on, table, length + path, target), state.routed
        if routed is not None:
            routed = on.move(routed, table, length + path, target)
        rows = rows._replace(tokens=along(path, rows.tokens), positions=length + index)
        return state.replace(trunk=caches, routed=routed), rows


@jax.named_scope("rank")
def ranked(
    state: State, drafts: Drafts, estimate: Float[Array, "s K two"], kept: int, shards: int
) -> tuple[Drafts, Packing]:
    """The drafts that are verified, ``kept`` per slot on average, and the packing of their windows."""
    slots = len(drafts.tokens)
    return ranking.likeliest(drafts, take_slots(state.slots, slots), estimate, kept * slots // shards, shards)


def rows_of(state: State, drafts: Drafts, pages: int, packing: Packing | None = None) -> PartRows:
    """Every slot's newest token and drafts. Drafts past its own depth are padding, as are idle slots."""
    which = len(drafts.tokens)
    s = take_slots(state.slots, which)
    tokens = jnp.maximum(jnp.concatenate([s.newest[:, None], drafts.tokens], axis=1), 0)
    index = jnp.arange(tokens.shape[1])
    count = jnp.where(s.active, num_drafts(s, drafts) + 1, 0)
    written = jnp.where(index < count[:, None], s.length[:, None] + index, -1)
    visible = replace(chain(s.length, count), ancestors=drafts.lineage)
    view = PagedView(s.page_table[:, :pages], written, visible, packing=packing, slot=jnp.arange(which))
    return PartRows(which, s, tokens, s.length[:, None] + drafts.steps, view)


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
