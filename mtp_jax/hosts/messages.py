"""What goes over the launch log beside launches."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import UInt32

from mtp_jax.decode.keys import Key


class LogError(Exception):
    """A message that cannot be read, or must not come."""


class Message:
    """Anything but a launch."""


@dataclass(frozen=True)
class Alive(Message):
    """This end lives."""


# The start and the end


@dataclass(frozen=True)
class Hello(Message):
    """What a follower is about to do: names and values (``hello.py``)."""

    description: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Welcome(Message):
    """All are about to do the same."""


@dataclass(frozen=True)
class Refused(Message):
    """They are not."""

    reason: str


@dataclass(frozen=True)
class Failed(Message):
    """The sender ends, and cannot go on."""

    reason: str


@dataclass(frozen=True)
class End(Message):
    """The work is done."""


# Programs, and what belongs to a launch


@dataclass(frozen=True)
class Compile(Message):
    """Compile a program, which has this number."""

    job: int
    key: Key


@dataclass(frozen=True)
class Compiled(Message):
    """A follower has compiled it."""

    job: int


@dataclass(frozen=True)
class Publish(Message):
    """From here on the program may be launched."""

    job: int
    key: Key


@dataclass(frozen=True)
class Masks(Message):
    """What grammars allow in the structured step that is being launched."""

    allowed: UInt32[Any, "B W words"]
