"""Parts of an assistant's turn, found in its text as it grows: thoughts, text, calls of tools."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mtp_jax import (
    CallArguments,
    CallBegin,
    CallEnd,
    CompletionOutput,
    JsonObject,
    OutputText,
    Thoughts,
    ToolUse,
)
from serve.base.ids import new_id


@dataclass(frozen=True)
class Thought:
    """Text of a thought."""

    text: str


Piece = Thought | OutputText | CallBegin | CallArguments | CallEnd


class Turn:
    """Parses one completion of a conversation.

    Attributes:
        calls: number of calls of tools that have begun.
    """

    def __init__(self, thinking: bool, may_think: bool, use: ToolUse | None) -> None:
        """thinking: whether the prompt opened a thought. may_think: whether the output may. use: of tools."""
        self._splitter = Thoughts(may_think).splitter(thinking)
        self._parser = use.parser() if use else None
        self._forced = use is not None and use.forced
        self._most = None if use is None or use.several else 1
        self._space: list[str] = []
        self.calls = 0

    def push(self, c: CompletionOutput) -> list[Piece]:
        """Take a completion, or its new part; return the pieces of the turn that are certain now."""
        ended = c.finish_reason is not None
        if self._parser:
            parts = self._parser.push(c.text)
            parts += self._parser.flush(cut=c.finish_reason != "stop") if ended else []
        else:
            parts = [OutputText(c.text)]
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, OutputText):
                pieces += self._said(*self._splitter.push(part.text))
            elif self._most is None or part.index < self._most:
                if isinstance(part, CallBegin):
                    pieces += self._said(*self._splitter.call())
                    self._space = []
                pieces.append(self._named(part))
        if not ended:
            return pieces
        pieces += self._said(*self._splitter.flush())
        if self._space and not (self._calls_follow or self.calls):
            pieces.append(OutputText("".join(self._space)))
        return pieces

    @property
    def _calls_follow(self) -> bool:
        """Whether the end of the output has cut the beginning of its first call."""
        return self._parser is not None and (self._forced or self._parser.within)

    def _said(self, thought: str, text: str) -> list[Piece]:
        """Pieces of thought and text. White space waits for its sequel: before a call it is dropped."""
        if self._parser and text:
            shown = text.rstrip()
            space = text[len(shown) :]
            text = "".join([*self._space, shown]) if shown else ""
            self._space = [*([] if shown else self._space), *([space] if space else [])]
        return [*([Thought(thought)] if thought else []), *([OutputText(text)] if text else [])]

    def finish_reason(self, c: CompletionOutput) -> str | None:
        """The reason of the end, by OpenAI's names; "tool_calls" for an output that ended with calls."""
        return "tool_calls" if c.finish_reason == "stop" and self.calls else c.finish_reason

    def _named(self, part: CallBegin | CallArguments | CallEnd) -> Piece:
        if not isinstance(part, CallBegin):
            return part
        self.calls += 1
        return part if part.id else CallBegin(part.index, part.name, f"call_{new_id()}")


@dataclass
class Called:
    """A call of a tool, with the pieces of its arguments so far."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """Its arguments as the model has written them."""
        return "".join(self.pieces)

    @property
    def body(self) -> JsonObject:
        """The call in OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments.strip()}
        return {"id": self.id, "type": "function", "function": function}


def called(pieces: Iterable[Piece]) -> list[Called]:
    """The calls among the pieces of one completion."""
    calls: list[Called] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls.append(Called(piece.id or "", piece.name))
        elif isinstance(piece, CallArguments):
            calls[piece.index].pieces.append(piece.text)
    return calls
