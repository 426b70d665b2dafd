"""The step's questions to a drafter of any kind."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.decode import tree
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.mla import Form
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import STREAMS, Taps

FINAL = -1
"""The number, among a drafter's features, of the hidden state after the final norm."""

Features = tuple[Float[Array, "_B _W _D"], ...]
"""The hidden states that ``Drafter.features`` names, in that order."""


class Drafts(struct.PyTreeNode):
    """The drafts of every slot, and the distributions that they were drawn from.

    Attributes:
        tokens: K drafts; tokens past ``count`` are padding.
        count: drafts that there are. It depends on nothing that this step draws.
        source: ``Source`` of each row's drafts.
        logits: behind the drafts; None if the drafter has none, or only the drafts are handed on.
        probs: the distribution of each draft, given the drafts before it; None in greedy steps.
        parents: the node of the window's tree that each draft follows, an earlier one (``tree``), padding
            too; None: a chain, in which each draft follows the one before it.
        margins: how sure the drafter was of each draft before it drew it (``DraftRules.margin``); None
            unless the rules ask for it.
    """

    tokens: Int[Array, "B K"]
    count: Int[Array, " B"]
    source: Int[Array, " B"]
    logits: Float[Array, "B K V"] | None
    probs: Float[Array, "B K V"] | None
    parents: Int[Array, "B K"] | None = None
    margins: Float[Array, "B K"] | None = None

    @property
    def lineage(self) -> Int[Array, "B W"] | None:
        """The drafts up to each node of a tree (``tree.lineage``); None for a chain."""
        return None if self.parents is None else tree.lineage(self.parents)

    @property
    def steps(self) -> Int[Array, "#B W"]:
        """The number of drafts up to each node of the window."""
        bits = self.lineage
        return jnp.arange(self.tokens.shape[1] + 1)[None] if bits is None else tree.depths(bits)


class Committed(struct.PyTreeNode):
    """Tokens that became part of their sequences: the first ``count`` of each row.

    Attributes:
        tokens: a window or a chunk of each row.
        positions: positions of the tokens; -1 for tokens that do not count.
        features: hidden states of the tokens.
        count: tokens that count.
        page_table: their slots' pages, as far as the program looks.
        form: MLA form in which layers attend to them.
        defer: whether work that only drafts need may be left to ``flush``; there is one token then.
    """

    tokens: Int[Array, "B W"]
    positions: Int[Array, "B W"]
    features: Features
    count: Int[Array, " B"]
    page_table: Int[Array, "B n"]
    form: Form = struct.field(pytree_node=False, default="absorbed")
    defer: bool = struct.field(pytree_node=False, default=False)

    def last(self, states: Float[Array, "B W ..."], before: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
        """The states of the last token of each row that counts; ``before`` in rows that have none."""
        ones = (1,) * (states.ndim - 2)
        last = jnp.maximum(self.count - 1, 0).reshape(-1, 1, *ones)
        found = jnp.take_along_axis(states, last, axis=1)[:, 0]
        return jnp.where((self.count > 0).reshape(-1, *ones), found, before)


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts from a state of its own. It is hashable, as programs are compiled for one drafter.

    A method takes and returns the rows of ``DrafterState.slots`` that belong to the slots it is given, and
    all pages.
    """

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that ``observe`` needs: k: the residual stream after k layers; FINAL; STREAMS."""
        ...

    @property
    def deferral(self) -> int:
        """Calls of ``observe`` that defer work, after which ``flush`` must run; 0: it never needs to."""
        ...

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """A zeroed state. pages: of all data shards."""
        ...

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot, after its newest token. ``s`` has the pages that may be looked at."""
        ...

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Take committed tokens, after every prefill and every verification."""
        ...

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Do the deferred work, for all slots: before a draft, a prefill, or a change of slots or pages."""
        ...

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """Begin a sequence in ``slot``, of all slots, that goes on from the end of ``page``."""
        ...


def taps_of(drafter: Drafter, layers: int) -> tuple[int, ...]:
    """The residual streams that the drafter observes. Raises ConfigError if a trunk has fewer."""
    wanted = drafter.features
    if any(not 0 <= number <= layers and number not in (FINAL, STREAMS) for number in wanted):
        raise ConfigError(
            f"features = {wanted} of {type(drafter).__name__}; a trunk of {layers} layers hands on its "
            f"residual streams 0 to {layers}, {FINAL}, the state after the final norm, and {STREAMS}, all "
            "streams behind the last layer"
        )
    return tuple(sorted({number for number in wanted if number != FINAL}))


def width_of(trunk: ModelConfig, number: int) -> int:
    """Values of the hidden state with this number in ``Drafter.features``."""
    return (trunk.streams if number == STREAMS else 1) * trunk.hidden_size


def features_of(drafter: Drafter, hidden: Float[Array, "B W D"], taps: Taps) -> Features:
    """The hidden states that the drafter observes, from the final norm's and the streams of ``taps_of``."""
    return tuple(hidden if number == FINAL else taps[number] for number in drafter.features)
