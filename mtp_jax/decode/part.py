"""The rows that one part of a step puts through the trunk: the windows of slots, or the chunk of prompts."""

from typing import NamedTuple

from jaxtyping import Array, Int

from mtp_jax.decode.state import Slots, Which
from mtp_jax.model.cache import PagedView


class StepPart(NamedTuple):
    """The rows of one part.

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
