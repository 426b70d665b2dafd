"""Messages over the launch log beside launches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import UInt32

from mtp_jax.decode.arrays import Chunk, SamplingState, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, PageKey, SamplingMode, ScoreKey, StepKey
from mtp_jax.decode.launches import Launch
from mtp_jax.wire.connection import WireError


class LogError(WireError):
    """An unexpected message."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class HostMessage:
    """A message that is no launch."""


Logged = HostMessage | Launch[Any]
"""An entry of the log."""


@dataclass(frozen=True)
class Alive(HostMessage):
    """A sign of life."""


# The start and the end


@dataclass(frozen=True)
class Hello(HostMessage):
    """The options of a follower: names and values (``hello.py``)."""

    description: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Welcome(HostMessage):
    """All ranks have the same options."""


@dataclass(frozen=True)
class Refused(HostMessage):
    """A rank has other options, so the group does not start."""

    reason: str


@dataclass(frozen=True)
class Proposed(HostMessage):
    """The number for which a follower has memory."""

    count: int


@dataclass(frozen=True)
class Agreed(HostMessage):
    """The least of all ranks' numbers."""

    count: int


@dataclass(frozen=True)
class Failed(HostMessage):
    """The sender has failed, and ends."""

    reason: str


@dataclass(frozen=True)
class End(HostMessage):
    """The work is done."""


# Programs, and masks of a launch


@dataclass(frozen=True)
class Compile(HostMessage):
    """Compile a program, and give it this number."""

    job: int
    key: Key


@dataclass(frozen=True)
class Compiled(HostMessage):
    """A follower has compiled the program with this number."""

    job: int


@dataclass(frozen=True)
class Publish(HostMessage):
    """The program with this number may be launched from here on."""

    job: int
    key: Key


@dataclass(frozen=True)
class Masks(HostMessage):
    """The masks of grammars in the structured step that is being launched."""

    allowed: UInt32[Any, "B W words"]


_PARTS = (SlotRow, SamplingState, Chunk, StepKey, DraftKey, PageKey, ScoreKey, SamplingMode)
KINDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (*HostMessage.__subclasses__(), *Launch.__subclasses__(), *_PARTS)
}
"""Classes of messages over the launch log, by name."""
