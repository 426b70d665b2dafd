"""Tools that are no functions: a custom tool, which takes a text, becomes a function of one string."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, Tag

from mtp_jax import JsonObject
from serve.bodies.fields import Body, Name, Text, one_of
from serve.bodies.tools import MOST_TOOLS, FunctionName, Named, NamedChoice, ToolBody, named

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
    """A tool that takes a text. The prompt states its grammar, if any; the text is not held to it."""

    type: Literal["custom"]
    custom: _Custom

    @property
    def as_function(self) -> ToolBody:
        """The function that the prompt describes."""
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
        """Fields of the tool without effect: the grammar."""
        if self.custom.format and self.custom.format.grammar:
            yield f"{path}.format.grammar"


class OtherTool(Body):
    """A tool that a server would have to run, such as ``web_search``: the prompt leaves it out."""

    type: Name

    def left_out(self, path: str) -> Iterator[str]:
        """Fields of the tool without effect: the whole tool."""
        yield f"{path}.{self.type}"


TOOLS = one_of(
    {None: "a function", "function": "a function", "custom": "a custom tool"}, other="another tool"
)
"""The class for a tool of a request."""
ToolItem = Annotated[
    Annotated[ToolBody, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom tool")]
    | Annotated[OtherTool, Tag("another tool")],
    TOOLS,
]


class CustomChoice(Body):
    """A custom tool that must be called."""

    type: Literal["custom"]
    custom: Named

    @property
    def as_function(self) -> NamedChoice:
        """The choice of the custom tool's function."""
        return NamedChoice.model_validate(named(self.custom.name))


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
    """Some of the tools, which alone may or must be called; the prompt describes all tools."""

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
PICKS: Mapping[str | None, str] = {
    "function": "a function",
    "custom": "a custom tool",
    "allowed_tools": "some tools",
}
ToolPick = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")]
    | Annotated[NamedChoice, Tag("a function")]
    | Annotated[CustomChoice, Tag("a custom tool")]
    | Annotated[AllowedChoice, Tag("some tools")],
    one_of(PICKS, CHOICES, of_text="a string"),
]


class _CalledText(Body):
    name: FunctionName
    input: Text


class CalledCustom(Body):
    """A call of a custom tool in an assistant's message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["custom"]
    custom: _CalledText

    def for_template(self) -> JsonObject:
        """The call of the custom tool's function."""
        arguments = json.dumps({"input": self.custom.input}, ensure_ascii=False)
        function = {"name": self.custom.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}
