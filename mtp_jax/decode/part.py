"""A part of a step: the windows of slots, or the chunk of prompts. Both go through the trunk side by side."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.decode.arrays import TopLogprobs
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Committed, Features
from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.result import Emitted, StepResult
from mtp_jax.decode.sampling import top_logprobs
from mtp_jax.decode.state import Slots, State, Which, put_slots
from mtp_jax.model.cache import PagedView
from mtp_jax.model.params import Params


class PartRows(NamedTuple):
    """The rows that a part puts through the trunk.

    Attributes:
        which: slot of each sequence.
        slots: these slots, from before the step.
        tokens: tokens padded to W.
        positions: positions of the tokens, whether they count or not.
        view: the place where they are written, and the rows that they see.
    """

    which: Which
    slots: Slots
    tokens: Int[Array, "B W"]
    positions: Int[Array, "B W"]
    view: PagedView

    def committed(self, features: Features, count: Int[Array, " B"], defer: bool = False) -> Committed:
        """The first ``count`` tokens of each row as part of its sequence."""
        positions = jnp.where(jnp.arange(self.tokens.shape[1]) < count[:, None], self.positions, -1)
        table, form = self.view.page_table, self.view.form
        return Committed(self.tokens, positions, features, count, table, form, defer)


class Outputs(NamedTuple):
    """Outputs of the trunk's pass for the rows of a part.

    Attributes:
        hidden: hidden states after the final norm.
        features: hidden states that the drafter observes.
        logits: logits of the rows that ``Part.scored`` names; None where ``Part.greedy`` spares them.
    """

    hidden: Float[Array, "_B _W D"]
    features: Features
    logits: Float[Array, "_B _w V"] | None


@dataclass(frozen=True)
class Part(ABC):
    """A part of a step, which says by itself how the state goes on from its rows.

    Attributes:
        key: the step's.
    """

    decoding: Decoding
    key: StepKey
    rows: PartRows

    @property
    @abstractmethod
    def greedy(self) -> bool:
        """Whether the likeliest tokens are enough, in the place of logits."""

    @abstractmethod
    def scored(self, hidden: Float[Array, "_B _W D"]) -> Float[Array, "_B _w D"]:
        """The rows whose logits the part reads."""

    @abstractmethod
    def conclude(self, params: Params, state: State, out: Outputs) -> tuple[State, StepResult]:
        """The state after the part, with its tokens emitted and committed."""

    def commit(self, params: Params, state: State, seen: Committed, after: Slots) -> State:
        """The state in which these tokens belong to their sequences. after: the part's slots."""
        rows, own = self.rows, state.drafter.of(self.rows.which)
        told = self.decoding.drafter.observe(params, own, seen, self.decoding.model.on)
        slots = put_slots(state.slots, rows.which, after, rows.slots)
        return state.replace(slots=slots, drafter=state.drafter.put(rows.which, told, own))

    def top(self, logits: Float[Array, "_B _w V"] | None, emitted: Emitted) -> TopLogprobs | None:
        """Log-probabilities of the emitted tokens, where the mode has any."""
        count = self.key.mode.logprobs
        return None if count is None or logits is None else top_logprobs(logits, emitted.tokens, count)
