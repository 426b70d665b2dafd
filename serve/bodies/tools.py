"""Tools of a conversation, in the fields of requests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from mtp_jax import JsonObject, Tool, ToolUse
from serve.bodies.fields import Body, Text

MOST_TOOLS = 256
LONGEST_NAME = 128
# Names as OpenAI's API allows them, and dots for namespaces.
FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}$")]


class Function(Body):
    """The name of a tool, and its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        """The tool for the grammar and the parser."""
        return Tool(self.name, self.parameters or {}, self.strict is True)


class ToolBody(Body):
    """OpenAI's tool: a function."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> JsonObject:
        """The tool as the client gave it."""
        return self.model_dump(exclude_none=True)


class Named(Body):
    """The name of a tool."""

    name: FunctionName


class NamedChoice(Body):
    """A choice of one function, which the model must call."""

    type: Literal["function"]
    function: Named


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def named(name: str) -> JsonObject:
    """Turns the choice of one function into the chat route's form."""
    return {"type": "function", "function": {"name": name}}


def some(mode: str, names: Iterable[str]) -> JsonObject:
    """The choice of some functions, as the chat route has it. mode: "auto" or "required"."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(named, names)]}}


class CalledFunction(Body):
    """A function and its arguments, as JSON text."""

    name: FunctionName
    arguments: Text


class CalledTool(Body):
    """A call in an assistant's message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


def use_of(
    form: str,
    tools: Sequence[ToolBody] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    also: Mapping[str, str],
) -> ToolUse | None:
    """The use of tools that a request allows its output; None where no tool may be called.

    also: further names that calls may use, and the tool of each. Raises RequestError for tools and choices
    that do not go together.
    """
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    kind = "named" if isinstance(choice, NamedChoice) else choice or "auto"
    return ToolUse.of(
        form,
        [body.function.tool for body in tools or ()],
        kind,
        name=named,
        several=parallel is not False,
        also=also,
    )
