"""The body of /v1/responses: the items of OpenAI's Responses API, as messages of the chat route."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from pydantic_core import to_json

from mtp_jax import JsonObject
from serve.bodies.conversation import MAX_MESSAGES, RefusalPart
from serve.bodies.custom_tools import CHOICES, PICKS, TOOLS, OtherTool
from serve.bodies.fields import NOT_TEXT, Body, Name, Text, TextOr, bounds, form, one_of
from serve.bodies.schema import CallBody, ChatBody
from serve.bodies.tools import FunctionName
from serve.bodies.variables import Switches

_STORED = ("previous_response_id", "conversation", "prompt", "background")
_OF_OTHER_ROUTES = ("prompt_logprobs", "return_token_ids", "return_token_origins")


class _Part(Body):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text


_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_AnyPart = Annotated[
    Annotated[_Part, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")],
    one_of({**dict.fromkeys(_TEXTS, "a text"), "refusal": "a refusal"}, NOT_TEXT),
]
_Content = TextOr[_AnyPart]


class _MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class _CallItem(Body):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text

    @property
    def call(self) -> JsonObject:
        """The call in the form of the chat route's messages."""
        return {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class _CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: FunctionName
    input: Text

    @property
    def call(self) -> JsonObject:
        """The same."""
        return {"id": self.call_id, "type": "custom", "custom": {"name": self.name, "input": self.input}}


class _OwnCallItem(Body):
    """A call of a tool that the client runs and that has a type of its own: its fields are the arguments."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: Name

    @property
    def call(self) -> JsonObject:
        """The same."""
        told = {k: v for k, v in (self.model_extra or {}).items() if k not in ("id", "status")}
        function = {"name": self.type.removesuffix("_call"), "arguments": to_json(told).decode()}
        return {"id": self.call_id, "function": function}


class _ResultItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: _Content


class _OwnResultItem(Body):
    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: Annotated[Name, Field(validation_alias=AliasChoices("call_id", "id"))]
    output: object = None


_Parts = Annotated[list[_Part], Field(fail_fast=True)]


class _ReasoningItem(Body):
    type: Literal["reasoning"]
    content: _Parts | None = None
    summary: _Parts | None = None


class _LeftOutItem(Body):
    """An item that only OpenAI's servers can read, or the work of a tool that they ran."""

    type: str


_LEFT_OUT = (
    "additional_tools",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
_OWN = ("local_shell_call", "shell_call", "apply_patch_call")
_KINDS: dict[str | None, str] = {
    **dict.fromkeys((None, "message"), "a message"),
    "function_call": "a call",
    "custom_tool_call": "a custom call",
    **dict.fromkeys(_OWN, "an own call"),
    "function_call_output": "a result",
    "custom_tool_call_output": "a result",
    **dict.fromkeys((f"{name}_output" for name in _OWN), "an own result"),
    "reasoning": "a thought",
    **dict.fromkeys(_LEFT_OUT, "another item"),
}


_Item = Annotated[
    Annotated[_MessageItem, Tag("a message")]
    | Annotated[_CallItem, Tag("a call")]
    | Annotated[_CustomCallItem, Tag("a custom call")]
    | Annotated[_OwnCallItem, Tag("an own call")]
    | Annotated[_ResultItem, Tag("a result")]
    | Annotated[_OwnResultItem, Tag("an own result")]
    | Annotated[_ReasoningItem, Tag("a thought")]
    | Annotated[_LeftOutItem, Tag("another item")],
    one_of(
        _KINDS,
        "is none of message, function_call, function_call_output, custom_tool_call, custom_tool_call_output "
        "and reasoning; nothing is stored here that could be referred to",
    ),
]


class _Tool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def tool(self) -> JsonObject:
        """The tool as the chat route has it."""
        keys = ("name", "description", "parameters", "strict")
        return {
            "type": "function",
            "function": {k: v for k in keys if (v := getattr(self, k)) is not None},
        }


class _CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: Text | None = None


class _CustomTool(Body):
    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: _CustomFormat | None = None

    @property
    def tool(self) -> JsonObject:
        """The same."""
        about: JsonObject = {"name": self.name, "description": self.description}
        if (f := self.format) and f.type == "grammar":
            grammar = {"syntax": f.syntax, "definition": f.definition}
            about["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": about}

    def left_out(self, path: str) -> Iterator[str]:
        """Parts of the tool without effect: the grammar."""
        if self.format and self.format.type == "grammar":
            yield f"{path}.format"


_ToolItem = Annotated[
    Annotated[_Tool, Tag("a function")]
    | Annotated[_CustomTool, Tag("a custom tool")]
    | Annotated[OtherTool, Tag("another tool")],
    TOOLS,
]


class _Named(Body):
    type: Literal["function", "custom"]
    name: FunctionName


class _Allowed(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[JsonObject], Field(fail_fast=True)]


def _picked(choice: "_Named | _Allowed") -> JsonObject:
    """The choice of a tool in the form of the chat route."""
    if isinstance(choice, _Named):
        return {"type": choice.type, choice.type: {"name": choice.name}}
    # A tool that a server would have to run cannot be called here.
    kinds = ("function", "custom")
    tools = [{"type": k, k: {"name": t.get("name")}} for t in choice.tools if (k := t.get("type")) in kinds]
    return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    strict: bool | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class _TextOptions(Body):
    format: _Format | None = None
    verbosity: str | None = None


class ResponsesBody(CallBody, Switches):
    """The body of the route."""

    without_effect: ClassVar = CallBody.without_effect | {"client_metadata", "max_tool_calls"}

    input: Annotated[
        Annotated[Text, Tag("a string")]
        | Annotated[list[_Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("a list")],
        Discriminator(form),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, bounds("max_tokens")] | None = None
    tools: Annotated[list[_ToolItem], Field(fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("a string")]
            | Annotated[_Named, Tag("a function")]
            | Annotated[_Named, Tag("a custom tool")]
            | Annotated[_Allowed, Tag("some tools")],
            one_of(PICKS, CHOICES, of_text="a string"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    store: bool | None = None
    metadata: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Name], Field(fail_fast=True)] | None = None

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Fields without effect, also tools and items that are left out, and log-probabilities."""
        yield from super().unknown(prefix)
        for i, tool in enumerate(self.tools or ()):
            yield from () if isinstance(tool, _Tool) else tool.left_out(f"{prefix}tools.{i}")
        for i, item in enumerate(self.input):
            if isinstance(item, _LeftOutItem):
                yield f"{prefix}input.{i}.{item.type}"
        # Other values concern tools that this server does not run, or have no effect on the answer.
        yield from (f"{prefix}include.{name}" for name in self.include or () if name.endswith(".logprobs"))

    @model_validator(mode="after")
    def _stands_alone(self) -> "ResponsesBody":
        for name in _STORED:
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name}: this server stores nothing; send the whole conversation as input")
        for name in _OF_OTHER_ROUTES:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not on this route; use /v1/chat/completions for it")
        if self.truncation == "auto":
            raise ValueError("truncation: only 'disabled' is supported; shorten the input instead")
        if self.n not in (None, 1):
            raise ValueError(f"n: a response is one answer, got {self.n}; leave it out")
        return self

    def conversation(self) -> ChatBody:
        """Convert the request to a body of the chat route. Raises ValidationError."""
        value = self.model_dump(exclude_none=True, by_alias=True, include=set(ChatBody.model_fields))
        value["messages"] = self._messages()
        value["max_tokens"] = self.max_output_tokens
        value["tools"] = [tool.tool for tool in self.tools or () if not isinstance(tool, OtherTool)]
        if isinstance(choice := self.tool_choice, _Named | _Allowed):
            value["tool_choice"] = _picked(choice)
        if self.text and (found := self.text.format):
            schema = {"name": found.name, "schema": found.schema_} if found.type == "json_schema" else None
            value["response_format"] = {"type": found.type, "json_schema": schema}
        return ChatBody.model_validate(value)

    def _messages(self) -> list[JsonObject]:
        turns: list[JsonObject] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        answer: JsonObject | None = None  # the assistant's turn that items are being added to
        for item in self.input:
            if isinstance(item, _LeftOutItem):
                continue
            if isinstance(item, _MessageItem) and item.role != "assistant":
                answer = None
                turns.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, _ResultItem | _OwnResultItem):
                answer = None
                told = _text(item.output) if isinstance(item, _ResultItem) else _told(item.output)
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": told})
            else:
                if answer is None:
                    answer = {"role": "assistant", "content": []}
                    turns.append(answer)
                _add(answer, item)
        return [_joined(turn) for turn in turns]


_OfAnswer = _MessageItem | _CallItem | _CustomCallItem | _OwnCallItem | _ReasoningItem


def _add(turn: JsonObject, item: _OfAnswer) -> None:
    """Add an item to an assistant's turn, whose texts are lists until it is complete."""
    if isinstance(item, _MessageItem):
        turn["content"].append(_text(item.content))
    elif isinstance(item, _ReasoningItem):
        turn.setdefault("reasoning_content", []).append(_text(item.content or item.summary or []))
    else:
        turn.setdefault("tool_calls", []).append(item.call)


def _joined(turn: JsonObject) -> JsonObject:
    texts = ("content", "reasoning_content")
    return {k: "".join(v) if k in texts and isinstance(v, list) else v for k, v in turn.items()}


def _told(output: object) -> str:
    return output if isinstance(output, str) else to_json(output).decode()


def _text(content: str | Sequence[_Part | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
