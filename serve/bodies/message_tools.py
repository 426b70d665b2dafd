"""Tools of /v1/messages, in Anthropic's shapes, and messages that add tools or take them away."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mtp_jax import JsonObject, RequestError
from serve.bodies.client_tools import ClientTools, Entry, Identity
from serve.bodies.custom_tools import OtherTool
from serve.bodies.fields import Body, Name, Text, kind_of, member
from serve.bodies.known_schemas import ANTHROPIC
from serve.bodies.tools import FunctionName
from serve.bodies.toolsets import TOOLSETS

_DATED = re.compile(r"(\w+)_\d{8}")


class _Tool(Body):
    type: Name | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def entries(self) -> Iterator[Entry]:
        """The tools of this entry, in the form that ``ClientTools`` takes."""
        yield _entry(self.name, self.description, self.input_schema, self.strict)


class _KnownTool(Body):
    """A tool that the client runs, of a version whose arguments the API defines."""

    type: Name
    name: FunctionName
    strict: bool | None = None

    def entries(self) -> Iterator[Entry]:
        """The same."""
        yield _entry(self.name, *ANTHROPIC[_family(self.type)], self.strict)


class _Toolset(Body):
    """Many tools that the client runs, of a version whose names and arguments the API defines.

    Attributes:
        configs: options of tools by name; a tool is there unless its ``enabled`` is false.
    """

    type: Name
    configs: JsonObject | None = None

    @model_validator(mode="after")
    def _names_its_tools(self) -> "_Toolset":
        known = TOOLSETS[_family(self.type)][1]
        if unknown := next((name for name in self.configs or {} if name not in known), None):
            raise ValueError(f"configs: {unknown!r:.40} is none of its tools {', '.join(known)}")
        return self

    def entries(self) -> Iterator[Entry]:
        """The same."""
        toolset, members = TOOLSETS[_family(self.type)]
        for name, about in members.items():
            if member((self.configs or {}).get(name), "enabled") is not False:
                yield _entry(name, *about, None, toolset)


def _entry(
    name: str, description: str | None, schema: JsonObject, strict: bool | None, toolset: str = ""
) -> Entry:
    about = {"description": description, "strict": strict or None}
    told = {key: value for key, value in about.items() if value}
    return Identity("function", name, toolset), {"parameters": schema, **told}


def _family(kind: str | None) -> str:
    """A type without the date of its version."""
    dated = _DATED.fullmatch(kind or "")
    return dated[1] if dated else ""


def _tag(value: object) -> str:
    kind = kind_of(value)
    # A function in OpenAI's shape is an error that says so, as no tool of a client may disappear.
    if kind in (None, "custom", "function") or isinstance(member(value, "input_schema"), dict):
        return "a tool"
    family = _family(kind)
    own = "a known tool" if family in ANTHROPIC else "another tool"
    return "a toolset" if family in TOOLSETS else own


Tool = Annotated[
    Annotated[_Tool, Tag("a tool")]
    | Annotated[_KnownTool, Tag("a known tool")]
    | Annotated[_Toolset, Tag("a toolset")]
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


def client_tools(tools: Iterable[Tool], changes: Iterable[ToolChange]) -> ClientTools:
    """The tools that the client runs, after all changes; a toolset is added and taken away by its own name.

    Raises RequestError for two tools of one name, and for too many.
    """
    found = [entry for tool in tools if not isinstance(tool, OtherTool) for entry in tool.entries()]
    identities = [identity for identity, _ in found]
    if double := next((name for name, count in Counter(identities).items() if count > 1), None):
        raise RequestError(f"tools: the name {double.name!r} is there twice; give each tool its own")
    new: dict[Identity, JsonObject] = {}
    gone: set[str | None] = set()
    for change in changes:
        told = change.tool.definition
        names = {change.tool.name}
        if told is not None and not isinstance(told, OtherTool):
            added = dict(told.entries())
            new |= added
            names = {*map(_changed_by, added)}
        (gone.update if change.type == "tool_removal" else gone.difference_update)(names)
    found = [(identity, form) for identity, form in found if identity not in new] + [*new.items()]
    return ClientTools(entry for entry in found if _changed_by(entry[0]) not in gone)


def _changed_by(tool: Identity) -> str:
    """The name by which a message adds a tool or takes it away."""
    return tool.namespace or tool.name


def places(tools: Iterable[Tool]) -> Iterator[tuple[Identity, str]]:
    """Paths of the schemas of tools."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, OtherTool):
            yield from ((identity, f"tools.{i}.input_schema") for identity, _ in tool.entries())


def left_out(tools: Iterable[Tool], path: str) -> Iterator[str]:
    """Paths of tools that a server would have to run."""
    for i, tool in enumerate(tools):
        yield from tool.left_out(f"{path}tools.{i}") if isinstance(tool, OtherTool) else ()
