"""The body of /v1/responses: the items of OpenAI's Responses API, as messages of the chat route."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from pydantic_core import to_json

from mtp_jax import JsonObject
from serve.base.errors import ApiError
from serve.bodies.client_tools import ClientTools, Identity
from serve.bodies.conversation import MAX_MESSAGES, RefusalPart
from serve.bodies.fields import (
    Body,
    Name,
    Text,
    TextOr,
    form,
    kind_of,
    member,
    one_of,
    told,
)
from serve.bodies.response_tools import OWN, ToolPick, Tools, entries, left_out, picked, places
from serve.bodies.schema import CallBody, ChatBody, MaxTokens, most_tokens
from serve.bodies.tools import FunctionName
from serve.bodies.unread import Unread, check_newest, unread
from serve.bodies.variables import Reasoning, Switches

_SAME = ChatBody.model_fields.keys() - {"tools", "tool_choice"}
# Fields of things that are stored at OpenAI, and the advice for each.
_STORED = {
    "previous_response_id": "the response is not found, as this server stores none; send the whole "
    "conversation as input",
    "conversation": "this server stores none; send the whole conversation as input",
    "prompt": "this server stores no prompt templates; send the text as instructions and input",
    "background": "this server keeps no answer to be asked for later; leave it out, and stream the answer",
}
_OF_OTHER_ROUTES = ("prompt_logprobs", "return_token_ids", "return_token_origins")


class _Part(Body):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text


_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_AnyPart = Annotated[
    Annotated[_Part, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[Unread, Tag("another part")],
    one_of({**dict.fromkeys(_TEXTS, "a text"), "refusal": "a refusal"}, other="another part"),
]
_Content = TextOr[_AnyPart]


class _MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    where: ClassVar = "content"

    @property
    def parts(self) -> _Content:
        """Its text, or its parts."""
        return self.content


class _CallItem(Body):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    namespace: Name | None = None
    arguments: Text

    def call(self, known: ClientTools) -> JsonObject:
        """The call in the form of the chat route's messages."""
        tool = Identity("function", self.name, self.namespace or "")
        return known.call(self.call_id, tool, self.arguments)


class _CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: FunctionName
    namespace: Name | None = None
    input: Text

    def call(self, known: ClientTools) -> JsonObject:
        """The same."""
        return known.call(self.call_id, Identity("custom", self.name, self.namespace or ""), self.input)


class _SearchCallItem(Body):
    """A search of tools by the client."""

    type: Literal["tool_search_call"]
    call_id: Name
    arguments: object = None

    def call(self, known: ClientTools) -> JsonObject:
        """The same."""
        tool = Identity("tool_search", "tool_search")
        return known.call(self.call_id, tool, _told(self.arguments or {}))


class _OwnCallItem(Body):
    """A call of a tool that the client runs and that has a type of its own: its fields are the arguments."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "computer_call"]
    call_id: Name
    # About the item, not of the call.
    without_effect: ClassVar = frozenset({"id", "status", "caller", "created_by", "pending_safety_checks"})

    def call(self, known: ClientTools) -> JsonObject:
        """The same."""
        told = {k: v for k, v in (self.model_extra or {}).items() if k not in self.without_effect}
        kind = self.type.removesuffix("_call")
        return known.call(self.call_id, Identity(kind, kind), to_json(told).decode())


class _ResultItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name | None = None
    name: Name | None = None
    output: _Content
    where: ClassVar = "output"

    @property
    def parts(self) -> _Content:
        """The same."""
        return self.output

    @property
    def text(self) -> str:
        """The result; a result of no call says which tool's it is."""
        text = _text(self.output)
        return text if self.call_id else f"Result of {self.name or 'a tool'}:\n{text}"


class _OwnResultItem(Body):
    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: Annotated[Name, Field(validation_alias=AliasChoices("call_id", "id"))]
    output: object = None

    @property
    def text(self) -> str:
        """The result."""
        return _told(self.output)


class _ScreenItem(Body):
    """The result of a call of a computer: a picture."""

    type: Literal["computer_call_output"]
    call_id: Name
    output: Unread | None = None

    @property
    def text(self) -> str:
        """The text in its place."""
        return self.output.text if self.output else ""


class _ToolsItem(Body):
    """Tools that may be called from here on, as the client adds them or a search found them."""

    type: Literal["additional_tools", "tool_search_output"]
    call_id: Name | None = None
    execution: Name | None = None
    tools: Tools = Field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        """Whether it is the result of a search by the client."""
        return self.type == "tool_search_output" and not _is_elsewhere(self)

    def output(self, known: ClientTools) -> str:
        """The result of the search: the names and descriptions of the tools."""
        found = [{"name": known.name(identity), **form} for identity, form in entries(self.tools)]
        return _told([{key: tool[key] for key in ("name", "description") if tool.get(key)} for tool in found])


_Parts = Annotated[list[_AnyPart], Field(fail_fast=True)]


class _ReasoningItem(Body):
    type: Literal["reasoning"]
    content: _Parts | None = None
    summary: _Parts | None = None


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class _TextOptions(Body):
    format: _Format | None = None
    verbosity: str | None = None


class _UpdateItem(Body):
    """A change of the request's options, which holds until the next."""

    type: Literal["configuration_update"]
    reasoning: Reasoning | None = None
    text: _TextOptions | None = None


class _LeftOutItem(Body):
    """An item that only OpenAI's servers can read, or the work of a tool of theirs, or of an unknown type."""

    type: Name


_KINDS: dict[str | None, str | None] = {
    **dict.fromkeys((None, "message"), "a message"),
    "function_call": "a call",
    "custom_tool_call": "a custom call",
    **dict.fromkeys((f"{name}_call" for name in OWN.values()), "an own call"),
    "function_call_output": "a result",
    "custom_tool_call_output": "a result",
    **dict.fromkeys((f"{name}_call_output" for name in OWN.values()), "an own result"),
    "computer_call_output": "a screen",
    **dict.fromkeys(("additional_tools", "tool_search_output"), "tools"),
    "tool_search_call": "a search",
    "reasoning": "a thought",
    "configuration_update": "a change of options",
    "item_reference": None,
}


def _tag(value: object) -> str | None:
    kind = kind_of(value)
    if kind is None and member(value, "id") is not None and member(value, "role") is None:
        return None  # a reference, which needs no type
    if kind == "tool_search_call" and _is_elsewhere(value):
        return "another item"
    return _KINDS.get(kind, "another item")


def _is_elsewhere(item: object) -> bool:
    """Whether OpenAI's servers search, which they do without an id."""
    return member(item, "call_id") is None or member(item, "execution") == "server"


_OwnResult = _OwnResultItem | _ScreenItem
_Item = Annotated[
    Annotated[_MessageItem, Tag("a message")]
    | Annotated[_CallItem, Tag("a call")]
    | Annotated[_CustomCallItem, Tag("a custom call")]
    | Annotated[_SearchCallItem, Tag("a search")]
    | Annotated[_OwnCallItem, Tag("an own call")]
    | Annotated[_ResultItem, Tag("a result")]
    | Annotated[_OwnResultItem, Tag("an own result")]
    | Annotated[_ScreenItem, Tag("a screen")]
    | Annotated[_ToolsItem, Tag("tools")]
    | Annotated[_ReasoningItem, Tag("a thought")]
    | Annotated[_UpdateItem, Tag("a change of options")]
    | Annotated[_LeftOutItem, Tag("another item")],
    told(
        _tag,
        "nothing is stored here that could be referred to; send the item itself, such as a message, "
        "function_call or function_call_output",
    ),
]


class ResponsesBody(CallBody, Switches):
    """The body of the route."""

    # A field of stored things is refused, unless it is empty.
    without_effect: ClassVar = CallBody.without_effect | {"client_metadata", *_STORED}

    input: Annotated[
        Annotated[Text, Tag("a string")]
        | Annotated[list[_Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("a list")],
        Discriminator(form),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[
        MaxTokens, most_tokens("max_output_tokens", "max_tokens", "max_completion_tokens")
    ] = None
    tools: Tools | None = None
    tool_choice: ToolPick | None = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    store: bool | None = None
    metadata: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Name], Field(fail_fast=True)] | None = None
    # Without effect here; the answer repeats them.
    max_tool_calls: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    service_tier: Name | None = None
    user: Text | None = None

    @property
    def _items(self) -> "list[_Item]":
        return [] if isinstance(self.input, str) else self.input

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Fields without effect, also tools and items that are left out, and log-probabilities."""
        yield from super().unknown(prefix)
        yield from left_out(self.tools or (), prefix)
        for i, item in enumerate(self._items):
            if isinstance(item, _ToolsItem):
                yield from left_out(item.tools, f"{prefix}input.{i}")
            elif isinstance(item, _LeftOutItem):
                yield f"{prefix}input.{i}.{item.type}"
            elif isinstance(item, _ScreenItem) and item.output:
                yield from item.output.unknown(f"{prefix}input.{i}.output.")
            elif isinstance(item, _MessageItem | _ResultItem):
                yield from unread(item.parts, f"{prefix}input.{i}.{item.where}")
        # Other values concern tools that this server does not run, or have no effect on the answer.
        yield from (f"{prefix}include.{name}" for name in self.include or () if name.endswith(".logprobs"))

    @model_validator(mode="after")
    def _stands_alone(self) -> "ResponsesBody":
        for name, instead in _STORED.items():
            if (self.model_extra or {}).get(name):
                code = "previous_response_not_found" if name == "previous_response_id" else None
                raise ApiError(400, f"{name}: {instead}", name, code)
        for name in _OF_OTHER_ROUTES:
            if (value := getattr(self, name)) is not None and value is not False:
                raise ValueError(f"{name}: not on this route; use /v1/chat/completions for it")
        if self.n not in (None, 1):
            raise ValueError(f"n: a response is one answer, got {self.n}; leave it out")
        return self

    @model_validator(mode="after")
    def _reads_the_newest(self) -> "ResponsesBody":
        silent = _LeftOutItem | _UpdateItem
        told = [(i, item) for i, item in enumerate(self._items) if not isinstance(item, silent)]
        told = [(i, item) for i, item in told if not isinstance(item, _ToolsItem) or item.is_ours]
        of_tools = len(told) > 1 and isinstance(told[-2][1], _ResultItem | _OwnResult | _ToolsItem)
        for i, item in told[-1:]:
            if isinstance(item, _MessageItem) and item.role == "user" and not of_tools:
                check_newest(item.content, f"input.{i}.content")
        return self

    @cached_property
    def client_tools(self) -> ClientTools:
        """The tools of the request: its list, and the lists of items. Raises RequestError for too many."""
        lists = [self.tools or (), *(item.tools for item in self._items if isinstance(item, _ToolsItem))]
        return ClientTools(tool for tools in lists for tool in entries(tools))

    def conversation(self) -> ChatBody:
        """Convert the request to a body of the chat route. Raises ValidationError, RequestError."""
        value = self.model_dump(exclude_none=True, by_alias=True, include=_SAME)
        value["messages"] = self._messages()
        value["max_tokens"] = self.max_output_tokens
        value["tools"] = self.client_tools.tools
        value["tool_choice"] = self.tool_choice and picked(self.tool_choice, self.client_tools)
        updates = [item for item in self._items if isinstance(item, _UpdateItem)]
        for effort in (item.reasoning.effort for item in updates if item.reasoning):
            value["reasoning"] = {**value.get("reasoning", {}), "effort": effort}
        formats = [told.format for told in (self.text, *(item.text for item in updates)) if told]
        if found := next(filter(None, reversed(formats)), None):
            told = {"name": found.name, "schema": found.schema_, "strict": found.strict}
            schema = told if found.type == "json_schema" else None
            value["response_format"] = {"type": found.type, "json_schema": schema}
        paths = {"response_format.json_schema.schema": "text.format.schema"}
        return ChatBody.model_validate(value).sent_as(paths | self.client_tools.paths(self._places()))

    def _places(self) -> Iterator[tuple[Identity, str]]:
        yield from places(self.tools or (), "tools")
        for i, item in enumerate(self._items):
            if isinstance(item, _ToolsItem):
                yield from places(item.tools, f"input.{i}.tools")

    def _messages(self) -> list[JsonObject]:
        turns: list[JsonObject] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        answer: JsonObject | None = None  # the assistant's turn that items are being added to
        for item in self.input:
            if isinstance(item, _LeftOutItem | _UpdateItem):
                continue
            if isinstance(item, _ToolsItem):
                if item.is_ours:
                    answer = None
                    found = item.output(self.client_tools)
                    turns.append({"role": "tool", "tool_call_id": item.call_id, "content": found})
            elif isinstance(item, _MessageItem) and item.role != "assistant":
                answer = None
                turns.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, _ResultItem | _OwnResult):
                answer = None
                of = {"role": "tool", "tool_call_id": item.call_id} if item.call_id else {"role": "user"}
                turns.append({**of, "content": item.text})
            else:
                if answer is None:
                    answer = {"role": "assistant", "content": []}
                    turns.append(answer)
                _add(answer, item, self.client_tools)
        return [_joined(turn) for turn in turns]


_OfAnswer = _MessageItem | _CallItem | _CustomCallItem | _SearchCallItem | _OwnCallItem | _ReasoningItem


def _add(turn: JsonObject, item: _OfAnswer, known: ClientTools) -> None:
    """Add an item to an assistant's turn, whose texts are lists until it is complete."""
    if isinstance(item, _MessageItem):
        turn["content"].append(_text(item.content))
    elif isinstance(item, _ReasoningItem):
        turn.setdefault("reasoning_content", []).append(_text(item.content or item.summary or []))
    else:
        turn.setdefault("tool_calls", []).append(item.call(known))


def _joined(turn: JsonObject) -> JsonObject:
    texts = ("content", "reasoning_content")
    return {k: "".join(v) if k in texts and isinstance(v, list) else v for k, v in turn.items()}


def _told(output: object) -> str:
    return output if isinstance(output, str) else to_json(output).decode()


def _text(content: str | Sequence[_Part | RefusalPart | Unread]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
