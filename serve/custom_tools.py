"""Tools of other types than functions: a custom tool, which takes a text, is one of one string here."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mtp_jax import CallArguments, CallBegin
from serve.fields import Body, Name, Text, one_of
from serve.tools import MOST_TOOLS, FunctionName, NamedChoice, ToolBody
from serve.turn import Called, Piece

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class _Grammar(Body):
    syntax: Literal["lark", "regex"]
    definition: Text


class _Format(Body):
    type: Literal["text", "grammar"]
    grammar: _Grammar | None = None


class _Custom(Body):
    name: FunctionName
    description: Text | None = None
    format: _Format | None = None


class CustomTool(Body):
    """A tool that takes a text. The model is told of the grammar that it may have; nothing enforces it."""

    type: Literal["custom"]
    custom: _Custom

    @property
    def as_function(self) -> ToolBody:
        """The function that the model is told of."""
        texts, form = [self.custom.description or ""], self.custom.format
        if form and form.grammar:
            texts.append(f"The input fits this grammar ({form.grammar.syntax}):\n{form.grammar.definition}")
        function = {
            "name": self.custom.name,
            "description": "\n\n".join(filter(None, texts)) or None,
            "parameters": _INPUT,
            "strict": True,
        }
        return ToolBody.model_validate({"type": "function", "function": function})

    def left_out(self, path: str) -> Iterator[str]:
        """What of it has no effect: the grammar."""
        if self.custom.format and self.custom.format.grammar:
            yield f"{path}.format.grammar"


class OtherTool(Body):
    """A tool that a server would have to run, such as ``web_search``: the model is not told of it."""

    type: Name

    def left_out(self, path: str) -> Iterator[str]:
        """What of it has no effect: all."""
        yield f"{path}.{self.type}"


def tool_kind(value: Any) -> str | None:
    """The type of a tool or a call, as the client names it."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def tool_form(value: Any) -> str:
    """Which class a tool of a request is of."""
    forms = {None: "a function", "function": "a function", "custom": "a custom tool"}
    return forms.get(tool_kind(value), "another tool")


ToolItem = Annotated[
    Annotated[ToolBody, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom tool")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(tool_form),
]


class _Named(Body):
    name: FunctionName


class CustomChoice(Body):
    """A custom tool that must be called."""

    type: Literal["custom"]
    custom: _Named

    @property
    def as_function(self) -> NamedChoice:
        """The choice of its function."""
        return NamedChoice.model_validate({"type": "function", "function": {"name": self.custom.name}})


class _Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedChoice, Tag("a function")] | Annotated[CustomChoice, Tag("a custom tool")],
                one_of({"function": "a function", "custom": "a custom tool"}, "expected function or custom"),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS),
    ]


class AllowedChoice(Body):
    """Some of the tools, which alone may or must be called; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed

    @property
    def names(self) -> list[str]:
        """Names of these tools."""
        chosen = self.allowed_tools.tools
        return [one.custom.name if isinstance(one, CustomChoice) else one.function.name for one in chosen]


CHOICES = (
    "expected none, auto, required, allowed_tools, or a tool of the type function or custom, as this server "
    "runs none itself"
)
PICKS = {"function": "a function", "custom": "a custom tool", "allowed_tools": "some tools"}
ToolPick = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")]
    | Annotated[NamedChoice, Tag("a function")]
    | Annotated[CustomChoice, Tag("a custom tool")]
    | Annotated[AllowedChoice, Tag("some tools")],
    one_of(PICKS, CHOICES, "a string"),
]


class _CalledText(Body):
    name: FunctionName
    input: Text


class CalledCustom(Body):
    """A call of a custom tool in an assistant's message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["custom"]
    custom: _CalledText

    def for_template(self) -> dict[str, Any]:
        """The call of its function."""
        arguments = json.dumps({"input": self.custom.input}, ensure_ascii=False)
        function = {"name": self.custom.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Inputs:
    """Turns the arguments of custom tools' calls into their text, as it grows. One object per completion."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._texts: dict[int, _FirstString] = {}

    def is_text(self, index: int) -> bool:
        """Whether a call that has begun is one of a custom tool."""
        return index in self._texts

    def body(self, index: int, call: Called) -> dict[str, Any]:
        """A whole call in OpenAI's shape."""
        if not self.is_text(index):
            return call.body
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Take the pieces of a turn; return the same with texts in the place of such arguments."""
        if not self._names:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin) and piece.name in self._names:
                self._texts[piece.index] = _FirstString()
            elif isinstance(piece, CallArguments) and piece.index in self._texts:
                piece = replace(piece, text=self._texts[piece.index].push(piece.text))
                if not piece.text:
                    continue
            found.append(piece)
        return found


class _FirstString:
    """The value of the first member of a JSON object that is a string, as its text comes."""

    _BEFORE = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
    _CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*', re.DOTALL)
    _HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # of a surrogate pair

    def __init__(self) -> None:
        self._held, self._inside = "", False

    def push(self, text: str) -> str:
        """Characters that are known now."""
        self._held += text
        if not self._inside:
            begun = self._BEFORE.match(self._held)
            if begun is None:
                return ""
            self._inside, self._held = True, self._held[begun.end() :]
        match = self._CHARACTERS.match(self._held)
        end = match.end() if match else 0
        if not self._held.startswith('"', end) and (half := self._HALF.search(self._held, 0, end)):
            end = half.start()  # its other half may come
        found, self._held = self._held[:end], self._held[end:]
        # A half without its other half is no character.
        decoded: str = json.loads(f'"{found}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
