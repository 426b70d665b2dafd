"""The blocks of an assistant's turn, one after the other: thoughts, texts, calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mtp_jax import CallArguments, CallBegin, CallEnd
from serve.answers.turn import Piece, Thought

Kind = Literal["thought", "text", "call", "custom"]


@dataclass
class Block:
    """A block, with its text so far.

    Attributes:
        index: number of the block among all blocks.
        pieces: pieces of its text, each with some of it.
        id, name: id and name of a call of either kind.
        ended: whether the model has written the end of the call.
    """

    kind: Kind
    index: int
    pieces: list[str] = field(default_factory=list)
    id: str = ""
    name: str = ""
    ended: bool = False

    @property
    def text(self) -> str:
        """Text of a thought or answer, a call's arguments as JSON text, or a custom tool's input: so far."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Change:
    """A change of a block: it begins, grows by ``text``, or ends."""

    what: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Sorts pieces into blocks. White space before a block's text, or between calls, is dropped.

    Attributes:
        all: blocks that have begun.
    """

    def __init__(self, custom: frozenset[str] = frozenset()) -> None:
        """custom: names of the tools whose calls have a text instead of JSON arguments."""
        self._custom = custom
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space: list[str] = []

    def push(self, pieces: Iterable[Piece]) -> list[Change]:
        """Sort pieces of a turn into blocks; return the changes of blocks."""
        changes: list[Change] = []
        for piece in pieces:
            if isinstance(piece, CallBegin):
                called: Kind = "custom" if piece.name in self._custom else "call"
                changes += [*self._end(), self._begin(called, piece.id or "", piece.name)]
            elif isinstance(piece, CallEnd):
                if self._open:
                    self._open.ended = True
                changes += self._end()
            elif isinstance(piece, CallArguments):
                changes += self._grow(piece.text)
            else:
                kind: Kind = "thought" if isinstance(piece, Thought) else "text"
                changes += self._said(kind, piece.text)
        return changes

    def finish(self) -> list[Change]:
        """End the last block; return that change."""
        return self._end()

    def _said(self, kind: Kind, text: str) -> list[Change]:
        if self._open and self._open.kind == kind:
            return self._grow(text)
        changes = self._end()
        self._space.append(text)
        if not text.strip():
            return changes
        text = "".join(self._space)
        return [*changes, self._begin(kind), *self._grow(text)]

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Change:
        self._open, self._space = Block(kind, len(self.all), id=id, name=name), []
        self.all.append(self._open)
        return Change("begin", self._open)

    def _grow(self, text: str) -> list[Change]:
        block = self._open
        if block is None:
            return []
        if block.kind == "call" and not block.pieces:
            text = text.lstrip()
        if not text:
            return []
        block.pieces.append(text)
        return [Change("grow", block, text)]

    def _end(self) -> list[Change]:
        block, self._open = self._open, None
        return [Change("end", block)] if block else []
