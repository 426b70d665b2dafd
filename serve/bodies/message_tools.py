"""Tools of /v1/messages, in Anthropic's shapes, and messages that add tools or take them away."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mtp_jax import JsonObject
from serve.bodies.custom_tools import OtherTool
from serve.bodies.fields import Body, Name, Text, kind_of, member
from serve.bodies.known_schemas import ANTHROPIC
from serve.bodies.tools import FunctionName

_DATED = re.compile(r"(\w+)_\d{8}")


class _Tool(Body):
    type: Name | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None

    @property
    def about(self) -> tuple[str | None, JsonObject]:
        """Its description and schema."""
        return self.description, self.input_schema


class _KnownTool(Body):
    """A tool that the client runs, of a version whose arguments the API defines."""

    type: Name
    name: FunctionName
    strict: bool | None = None

    @property
    def about(self) -> tuple[str | None, JsonObject]:
        """The same."""
        return ANTHROPIC[_family(self.type)]


def _family(kind: str | None) -> str:
    """A type without the date of its version."""
    dated = _DATED.fullmatch(kind or "")
    return dated[1] if dated else ""


def _tag(value: object) -> str:
    kind = kind_of(value)
    if kind in (None, "custom") or isinstance(member(value, "input_schema"), dict):
        return "a tool"
    return "a known tool" if _family(kind) in ANTHROPIC else "another tool"


Tool = Annotated[
    Annotated[_Tool, Tag("a tool")]
    | Annotated[_KnownTool, Tag("a known tool")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_tag),
]
Tools = Annotated[list[Tool], Field(fail_fast=True)]


class _Changed(Body):
    """A tool that a message adds or takes away: itself, or the name of one that there is."""

    type: Name
    name: FunctionName | None = None
    definition: Tool | None = None


class ToolChange(Body):
    """A block that adds a tool, or takes it away."""

    type: Literal["tool_addition", "tool_removal"]
    tool: _Changed


def functions(tools: Iterable[Tool], changes: Iterable[ToolChange]) -> list[JsonObject]:
    """The tools that the client runs, as the chat route has them, after all changes."""
    found = [_function(tool) for tool in tools if not isinstance(tool, OtherTool)]
    new: dict[str, JsonObject] = {}
    gone: set[str | None] = set()
    for change in changes:
        told = change.tool.definition
        if told is None or isinstance(told, OtherTool):
            name = change.tool.name
        else:
            name, new[told.name] = told.name, _function(told)
        (gone.add if change.type == "tool_removal" else gone.discard)(name)
    found = [one for one in found if one["function"]["name"] not in new] + [*new.values()]
    return [one for one in found if one["function"]["name"] not in gone]


def left_out(tools: Iterable[Tool], path: str) -> Iterator[str]:
    """Paths of tools that a server would have to run."""
    for i, tool in enumerate(tools):
        yield from tool.left_out(f"{path}tools.{i}") if isinstance(tool, OtherTool) else ()


def _function(tool: _Tool | _KnownTool) -> JsonObject:
    description, schema = tool.about
    about = {"description": description, "strict": tool.strict or None, "parameters": schema}
    given = {key: value for key, value in about.items() if value}
    return {"type": "function", "function": {"name": tool.name, "parameters": {}, **given}}
