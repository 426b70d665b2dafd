"""Bodies of /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mtp_jax import JsonObject
from serve.bodies.client_tools import ClientTools, Identity
from serve.bodies.conversation import MAX_MESSAGES, TextPart
from serve.bodies.fields import Body, Name, Stops, Text, TextOr, all_names, bounds, kind_of, member, one_of
from serve.bodies.foreign import CHAT, EMPTY, Refusing, is_neutral
from serve.bodies.message_tools import ToolChange, Tools, client_tools, left_out, places
from serve.bodies.schema import ChatBody
from serve.bodies.tools import FunctionName, named, some
from serve.bodies.unread import Unread, check_newest, unread
from serve.bodies.variables import Effort, Thinking

# Claude Code begins its system message with a line for Anthropic's accounts that differs in each request, so
# that no request would share a prefix with the request before.
_BILLING = "x-anthropic-billing-header:"
_SUMMARY = "Summary of the conversation before:\n\n"


class _SearchResultBlock(Body):
    type: Literal["search_result"]
    content: Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(block.text for block in self.content)


class _ReferenceBlock(Body):
    """A tool that a search found."""

    type: Literal["tool_reference"]
    tool_name: Name

    @property
    def text(self) -> str:
        """The name of the tool."""
        return f"[the tool {self.tool_name}]"


class _BrowserBlock(Body):
    """The tabs of a browser after a call of its toolset."""

    type: Literal["browser_state"]

    @property
    def text(self) -> str:
        """Its fields, as JSON."""
        told = {key: value for key, value in (self.model_extra or {}).items() if key != "cache_control"}
        return json.dumps(told, ensure_ascii=False)


class _TextSource(Body):
    type: Literal["text"]
    data: Text


class _PartsSource(Body):
    type: Literal["content"]
    content: TextOr[
        Annotated[
            Annotated[TextPart, Tag("a text")] | Annotated[Unread, Tag("another block")],
            one_of({"text": "a text"}, other="another block"),
        ]
    ]

    @property
    def data(self) -> str:
        """Its text."""
        return _text(self.content)


class _DocumentBlock(Body):
    type: Literal["document"]
    source: Annotated[
        Annotated[_TextSource, Tag("a text")] | Annotated[_PartsSource, Tag("parts")],
        one_of({"text": "a text"}, other="parts"),
    ]

    @property
    def text(self) -> str:
        """Its text."""
        return self.source.data


_KINDS = {
    "text": "a text",
    "search_result": "a result",
    "tool_reference": "a reference",
    "browser_state": "a browser",
}
_TAGS = {
    **_KINDS,
    "thinking": "a thought",
    "tool_use": "a call",
    "tool_result": "a result of a call",
    "compaction": "a summary",
    **dict.fromkeys(("tool_addition", "tool_removal"), "a change of tools"),
}


def _written(value: object) -> str:
    """The tag of a block that may stand in any message."""
    kind = kind_of(value)
    if kind == "document":  # other sources are files
        return "a document" if kind_of(member(value, "source")) in ("text", "content") else "another block"
    return _KINDS.get(kind or "", "another block")


def _any_block(value: object) -> str:
    return _TAGS.get(kind_of(value) or "") or _written(value)


_Written = (
    Annotated[TextPart, Tag("a text")]
    | Annotated[_SearchResultBlock, Tag("a result")]
    | Annotated[_ReferenceBlock, Tag("a reference")]
    | Annotated[_BrowserBlock, Tag("a browser")]
    | Annotated[_DocumentBlock, Tag("a document")]
    | Annotated[Unread, Tag("another block")]
)
_Texts = TextOr[Annotated[_Written, Discriminator(_written)]]


class _SummaryBlock(Body):
    """A summary of all blocks before it; none where it failed."""

    type: Literal["compaction"]
    content: Text | None = None
    tool_changes: Annotated[list[ToolChange], Field(fail_fast=True)] | None = None


class _ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text


class _ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    toolset_name: Name | None = None
    input: JsonObject

    def call(self, known: ClientTools) -> JsonObject:
        """The call in the form of the chat route's messages."""
        tool = Identity("function", self.name, self.toolset_name or "")
        return known.call(self.id, tool, json.dumps(self.input, ensure_ascii=False))


class _ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Texts | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The result, which says that it is an error if it is."""
        return ("Error: " if self.is_error else "") + _text(self.content)


_Block = Annotated[
    _Written
    | Annotated[_ThinkingBlock, Tag("a thought")]
    | Annotated[_ToolUseBlock, Tag("a call")]
    | Annotated[_ToolResultBlock, Tag("a result of a call")]
    | Annotated[_SummaryBlock, Tag("a summary")]
    | Annotated[ToolChange, Tag("a change of tools")],
    Discriminator(_any_block),
]


_SaidElsewhere = _ToolResultBlock | _SummaryBlock | ToolChange


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: TextOr[_Block]

    @property
    def blocks(self) -> "list[_Block]":
        """Its blocks; none where it is a text."""
        return [] if isinstance(self.content, str) else self.content

    def turns(self, known: ClientTools) -> Iterator[JsonObject]:
        """The chat route's messages for this message: results of tools become messages before other text."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.blocks
        for block in blocks:
            if isinstance(block, _ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        calls = [block.call(known) for block in blocks if isinstance(block, _ToolUseBlock)]
        text = _text(blocks)
        thought = "".join(b.thinking for b in blocks if isinstance(b, _ThinkingBlock))
        if text or calls or not any(isinstance(b, _SaidElsewhere) for b in blocks):
            more: JsonObject = {"reasoning_content": thought} if thought else {}
            more |= {"tool_calls": calls} if calls else {}
            yield {"role": self.role, "content": text, **more}

    @property
    def has_results(self) -> bool:
        """Whether results of tools are in it."""
        return any(isinstance(block, _ToolResultBlock) for block in self.blocks)

    @property
    def changes(self) -> Iterator[ToolChange]:
        """Changes of the tools."""
        for block in self.blocks:
            if isinstance(block, ToolChange):
                yield block
            elif isinstance(block, _SummaryBlock):
                yield from block.tool_changes or ()

    def unread(self, path: str) -> Iterator[str]:
        """Paths of blocks, also within results of tools, that the model does not see."""
        yield from unread(self.content, path)
        for i, block in enumerate(self.blocks):
            if isinstance(block, _ToolResultBlock):
                yield from unread(block.content, f"{path}.{i}.content")


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "_ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: goes with the type tool, and only with it")
        return self

    def picked(self, known: ClientTools) -> object:
        """The choice in the form of the chat route; a toolset's name is that of all its tools."""
        if self.name is None:
            return "required" if self.type == "any" else self.type
        tools = known.within(self.name) or [known.name(Identity("function", self.name))]
        return named(tools[0]) if len(tools) == 1 else some("required", tools)


class _Format(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class _OutputConfig(Body):
    effort: Effort | None = None
    format: _Format | None = None


class CountBody(Refusing):
    """/v1/messages/count_tokens."""

    without_effect: ClassVar = Refusing.without_effect | {"betas", "inference_geo", "service_tier", "speed"}

    model: Name | None = None
    messages: Annotated[list[_Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: _Texts | None = None
    tools: Tools | None = None
    tool_choice: _ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Fields without effect, also the tools and blocks that are left out."""
        yield from super().unknown(prefix)
        yield from left_out(self.tools or (), prefix)
        yield from unread(self.system, f"{prefix}system")
        for i, message in enumerate(self.messages):
            yield from message.unread(f"{prefix}messages.{i}.content")

    def _system(self) -> str:
        if not isinstance(self.system, list):
            return self.system or ""
        return _text([block for block in self.system if not getattr(block, "text", "").startswith(_BILLING)])

    @model_validator(mode="after")
    def _reads_the_newest(self) -> "CountBody":
        before, last = [None, *self.messages][-2:]
        if last and last.role == "user" and not (last.has_results or (before and before.has_results)):
            # Claude Code joins a message that was refused with the next, so text behind a picture is newer.
            check_newest(last.content, f"messages.{len(self.messages) - 1}.content", len(last.blocks) - 1)
        return self

    def _turns(self) -> list[JsonObject]:
        """The chat route's messages; a summary stands in the place of all before it."""
        known = self.client_tools
        places = [
            (i, j, block.content)
            for i, message in enumerate(self.messages)
            for j, block in enumerate(message.blocks)
            if isinstance(block, _SummaryBlock) and block.content
        ]
        if not places:
            return [turn for message in self.messages for turn in message.turns(known)]
        i, j, summary = places[-1]
        rest = [self.messages[i].model_copy(update={"content": self.messages[i].blocks[j:]})]
        told = [turn for message in rest + self.messages[i + 1 :] for turn in message.turns(known)]
        # Calls before it are left out, and so are their results.
        ids = {call["id"] for turn in told for call in turn.get("tool_calls", ())}
        told = [turn for turn in told if turn["role"] != "tool" or turn["tool_call_id"] in ids]
        return [{"role": "user", "content": _SUMMARY + summary}, *told]

    @cached_property
    def client_tools(self) -> ClientTools:
        """The tools of the request, and of its messages. Raises RequestError."""
        changes = (change for message in self.messages for change in message.changes)
        return client_tools(self.tools or (), changes)

    def chat(self, **more: Any) -> ChatBody:
        """Convert the request to a body of the chat route. more: further fields. Raises ValidationError."""
        turns = self._turns()
        # Anthropic's API does the same: the answer goes on with an assistant's message at the end.
        more["continue_final_message"] = turns[-1:] != [] and turns[-1]["role"] == "assistant"
        if system := self._system():
            turns.insert(0, {"role": "system", "content": system})
        value: JsonObject = {"messages": turns, **more}
        value["tools"] = self.client_tools.tools or None
        if choice := self.tool_choice:
            value["tool_choice"] = choice.picked(self.client_tools)
            value["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        config = self.output_config or _OutputConfig()
        value["thinking"] = self.thinking
        # Here an effort does not switch thinking on.
        value["chat_template_kwargs"] = config.effort and {"reasoning_effort": config.effort}
        if found := config.format or self.output_format:
            schema = {"schema": found.schema_, "strict": True}  # as Anthropic's API always is
            value["response_format"] = {"type": "json_schema", "json_schema": schema}
        chat = ChatBody.model_validate(value)
        form = "output_config.format" if config.format else "output_format"
        paths = {
            "chat_template_kwargs.reasoning_effort": "output_config.effort",
            "response_format.json_schema.schema": f"{form}.schema",
        }
        return chat.sent_as(paths | self.client_tools.paths(places(self.tools or ())))


# Fields of chats that this route does not have, with values that change nothing.
_OF_CHATS = dict.fromkeys(all_names(ChatBody) - Refusing.without_effect - {"stream_options"}, EMPTY) | {
    **dict.fromkeys(("n", "repetition_penalty", "repeat_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt", "skip_special_tokens"), (True,)),
}
_INSTEAD = {
    "stop": "use stop_sequences",
    "response_format": "use output_config",
    "reasoning_effort": "use output_config",
    **dict.fromkeys(("think", "enable_thinking", "reasoning"), "use thinking"),
    "parallel_tool_calls": "use tool_choice",
}


class MessagesBody(CountBody):
    """/v1/messages."""

    max_tokens: Annotated[int, bounds("max_tokens")]
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    stream: bool | None = None
    metadata: JsonObject | None = None
    thread: JsonObject | None = None

    @model_validator(mode="after")
    def _has_no_field_of_chats(self) -> "MessagesBody":
        for name, value in (self.model_extra or {}).items():
            if name in _OF_CHATS and not is_neutral(value, _OF_CHATS[name]):
                raise ValueError(f"{name}: not on this route; {_INSTEAD.get(name, CHAT)}")
        return self

    def conversation(self) -> ChatBody:
        """Convert the request to a body of the chat route. Raises ValidationError."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return self.chat(stop=self.stop_sequences, **{name: getattr(self, name) for name in same})


def _text(content: str | Sequence[object] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (TextPart, _SearchResultBlock, _ReferenceBlock, _BrowserBlock, _DocumentBlock, Unread)
    return "".join(block.text for block in content if isinstance(block, texts))
