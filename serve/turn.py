"""What an assistant's turn consists of, found in its text as it grows: thoughts, text, calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mtp_jax import CallArguments, CallBegin, CallEnd, CompletionOutput, OutputText, ToolUse
from serve.ids import new_id
from serve.reasoning import Splitter


@dataclass(frozen=True)
class Thought:
    """Text of a thought."""

    text: str


Part = OutputText | CallBegin | CallArguments | CallEnd
Piece = Thought | Part


class Turn:
    """One completion.

    Attributes:
        calls: how many calls of tools have begun.
    """

    def __init__(self, thinking: bool, may_think: bool, use: ToolUse | None) -> None:
        """thinking: the prompt has opened a thought. may_think: the output may open one. use: of tools."""
        self._splitter = Splitter(thinking, may_think)
        self._parser = use.parser() if use else None
        self._most = None if use is None or use.several else 1
        self.calls = 0

    def push(self, c: CompletionOutput) -> list[Piece]:
        """Take a completion, or what is new of it; return what is known now."""
        thought, text = self._splitter.push(c.text)
        ended = c.finish_reason is not None
        if ended:
            rest = self._splitter.flush()
            thought, text = thought + rest[0], text + rest[1]
        pieces: list[Piece] = [Thought(thought)] if thought else []
        if self._parser is None:
            return [*pieces, OutputText(text)] if text else pieces
        found = self._parser.push(text) + (self._parser.flush() if ended else [])
        return pieces + [self._named(part) for part in found if self._wanted(part)]

    def finish_reason(self, c: CompletionOutput) -> str | None:
        """OpenAI's: an output that ended with calls waits for their results."""
        return "tool_calls" if c.finish_reason == "stop" and self.calls else c.finish_reason

    def _wanted(self, part: Part) -> bool:
        return isinstance(part, OutputText) or self._most is None or part.index < self._most

    def _named(self, part: Part) -> Part:
        if not isinstance(part, CallBegin):
            return part
        self.calls += 1
        return part if part.id else CallBegin(part.index, part.name, f"call_{new_id()}")


@dataclass
class Called:
    """A call of a tool, as far as it has come."""

    id: str
    name: str
    arguments: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments.strip()}
        return {"id": self.id, "type": "function", "function": function}


def called(pieces: Iterable[Piece]) -> list[Called]:
    """The calls among the pieces of one completion."""
    calls: list[Called] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls.append(Called(piece.id or "", piece.name))
        elif isinstance(piece, CallArguments):
            calls[piece.index].arguments += piece.text
    return calls
