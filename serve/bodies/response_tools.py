"""Tools of /v1/responses, in OpenAI's shapes, wherever a request has them, and the choice of some."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mtp_jax import JsonObject
from serve.bodies.client_tools import ClientTools, Entry, Identity
from serve.bodies.custom_tools import CHOICES, OtherTool
from serve.bodies.fields import Body, Name, Text, kind_of, member, one_of
from serve.bodies.known_schemas import OPENAI
from serve.bodies.tools import MOST_TOOLS, FunctionName, named, some

OWN = {kind: kind.removesuffix("_use_preview") for kind in OPENAI}
"""Types of tools that a client runs and whose calls have a type of their own, with the name in that type."""

_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


class _Tool(Body):
    type: Name = "function"
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def entries(self, namespace: str) -> Iterator[Entry]:
        """The tools of this entry, in the form that ``ClientTools`` takes."""
        keys = ("description", "parameters", "strict")
        yield (
            Identity("function", self.name, namespace),
            {key: value for key in keys if (value := getattr(self, key)) is not None},
        )

    def left_out(self, path: str) -> Iterator[str]:
        """Parts of this entry without effect."""
        del path
        return iter(())


class _CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: Text | None = None


class _CustomTool(Body):
    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: _CustomFormat | None = None

    def entries(self, namespace: str) -> Iterator[Entry]:
        """The same."""
        about: JsonObject = {"description": self.description}
        if (f := self.format) and f.type == "grammar":
            grammar = {"syntax": f.syntax, "definition": f.definition}
            about["format"] = {"type": "grammar", "grammar": grammar}
        yield Identity("custom", self.name, namespace), about

    def left_out(self, path: str) -> Iterator[str]:
        """The grammar."""
        if self.format and self.format.type == "grammar":
            yield f"{path}.format"


class _SearchTool(Body):
    """A search of further tools, which the client runs, or OpenAI's servers."""

    type: Literal["tool_search"]
    execution: Name | None = None
    description: Text | None = None
    parameters: JsonObject | None = None

    def entries(self, namespace: str) -> Iterator[Entry]:
        """The same."""
        del namespace
        if self.execution == "client":
            about = {"description": self.description, "parameters": self.parameters or _QUERY}
            yield Identity(self.type, self.type), about

    def left_out(self, path: str) -> Iterator[str]:
        """The tool, if it is not the client that runs it."""
        if self.execution != "client":
            yield f"{path}.{self.type}"


class _OwnTool(Body):
    """A tool that a client runs and that has a type in the place of a name."""

    type: Literal["local_shell", "shell", "apply_patch", "computer", "computer_use_preview"]
    environment: object = None  # a computer's is a word

    @property
    def _is_elsewhere(self) -> bool:
        """Whether it runs in a container of OpenAI."""
        return kind_of(self.environment) not in (None, "local")

    def entries(self, namespace: str) -> Iterator[Entry]:
        """The same."""
        if not self._is_elsewhere:
            description, parameters = OPENAI[self.type]
            about = {"description": description, "parameters": parameters}
            yield Identity(OWN[self.type], OWN[self.type], namespace), about

    def left_out(self, path: str) -> Iterator[str]:
        """The tool, if it is not the client that runs it."""
        if self._is_elsewhere:
            yield f"{path}.{self.type}"


_KINDS: dict[str | None, str] = {
    **dict.fromkeys((None, "function"), "a function"),
    "custom": "a custom tool",
    "tool_search": "a search",
    **dict.fromkeys(OWN, "an own tool"),
}


def _inner(value: object) -> str:
    """The tag of a tool; a tool of an unknown type is a function if it has a schema of arguments."""
    has = isinstance(member(value, "parameters"), dict) and isinstance(member(value, "name"), str)
    return _KINDS.get(kind_of(value), "a function" if has else "another tool")


def _outer(value: object) -> str:
    return "a namespace" if kind_of(value) == "namespace" else _inner(value)


_Alone = (
    Annotated[_Tool, Tag("a function")]
    | Annotated[_CustomTool, Tag("a custom tool")]
    | Annotated[_SearchTool, Tag("a search")]
    | Annotated[_OwnTool, Tag("an own tool")]
    | Annotated[OtherTool, Tag("another tool")]
)


class _Namespace(Body):
    """Tools of one namespace. The prompt describes it where it describes the first of them."""

    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: Annotated[list[Annotated[_Alone, Discriminator(_inner)]], Field(fail_fast=True)]

    def entries(self, namespace: str) -> Iterator[Entry]:
        """The same."""
        del namespace
        about = f"All tools of {self.name}: {self.description}" if self.description else None
        for identity, form in entries(self.tools, self.name):
            texts = filter(None, (about, form.get("description")))
            yield identity, {**form, "description": "\n\n".join(texts)} if about else form
            about = None

    def left_out(self, path: str) -> Iterator[str]:
        """Parts of its tools without effect."""
        return left_out(self.tools, path)


ToolItem = Annotated[_Alone | Annotated[_Namespace, Tag("a namespace")], Discriminator(_outer)]
Tools = Annotated[list[ToolItem], Field(fail_fast=True)]


def entries(tools: Iterable[_Alone | _Namespace], namespace: str = "") -> Iterator[Entry]:
    """The tools that the client runs, in the form that ``ClientTools`` takes."""
    for tool in tools:
        if not isinstance(tool, OtherTool):
            yield from tool.entries(namespace)


def places(
    tools: Iterable[_Alone | _Namespace], path: str, namespace: str = ""
) -> Iterator[tuple[Identity, str]]:
    """Paths of the schemas of tools. path: place of the list of tools."""
    for i, tool in enumerate(tools):
        if isinstance(tool, _Namespace):
            yield from places(tool.tools, f"{path}.{i}.tools", tool.name)
        elif not isinstance(tool, OtherTool):
            yield from ((identity, f"{path}.{i}.parameters") for identity, _ in tool.entries(namespace))


def left_out(tools: Iterable[_Alone | _Namespace], path: str) -> Iterator[str]:
    """Paths of tools, and of parts of tools, without effect. path: of the object that has the tools."""
    for i, tool in enumerate(tools):
        yield from tool.left_out(f"{path}.tools.{i}" if path else f"tools.{i}")


class _Pick(Body):
    """A tool, or all tools of a namespace, that may or must be called."""

    type: Name
    name: FunctionName | None = None
    namespace: Name | None = None

    @model_validator(mode="after")
    def _is_named(self) -> "_Pick":
        if self.type in ("function", "custom", "namespace") and self.name is None:
            raise ValueError("name: this field is required; add it")
        return self

    def names(self, known: ClientTools) -> list[str]:
        """Their names in the prompt."""
        if self.type == "namespace":
            return known.within(self.name or "")
        kind = "computer" if self.type == "computer_use" else OWN.get(self.type, self.type)
        return [known.name(Identity(kind, self.name or kind, self.namespace or ""))]


class _Allowed(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Pick], Field(fail_fast=True, max_length=MOST_TOOLS)]


_PICKS: dict[str | None, str] = {
    **dict.fromkeys(("function", "custom", "namespace", "tool_search", "computer_use", *OWN), "a tool"),
    "allowed_tools": "some tools",
}
ToolPick = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a string")]
    | Annotated[_Pick, Tag("a tool")]
    | Annotated[_Allowed, Tag("some tools")],
    one_of(_PICKS, CHOICES, of_text="a string"),
]


def picked(choice: str | _Pick | _Allowed, known: ClientTools) -> object:
    """The choice of tools in the form of the chat route."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, _Pick) and choice.type != "namespace":
        return named(choice.names(known)[0])
    mode = choice.mode if isinstance(choice, _Allowed) else "required"
    picks = choice.tools if isinstance(choice, _Allowed) else [choice]
    # A tool that a server would have to run cannot be called here.
    once = {(pick.type, pick.name, pick.namespace): pick for pick in picks if pick.type in _PICKS}
    names = dict.fromkeys(name for pick in once.values() for name in pick.names(known))
    return some(mode, names)
