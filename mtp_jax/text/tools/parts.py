"""Parts of an output with calls of tools."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OutputText:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins. ``index`` counts from 0; ``id`` is the model's own, if its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete. A call that was cut or broken has no ``CallEnd``."""

    index: int


Part = OutputText | CallBegin | CallArguments | CallEnd
