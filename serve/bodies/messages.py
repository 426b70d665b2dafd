"""Bodies of /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from mtp_jax import JsonObject
from serve.bodies.conversation import MAX_MESSAGES
from serve.bodies.fields import NOT_TEXT, Body, Name, Stops, Text, TextOr, bounds, kind_of, told
from serve.bodies.message_tools import ToolChange, Tools, functions, left_out
from serve.bodies.schema import ChatBody
from serve.bodies.tools import FunctionName
from serve.bodies.variables import Effort, Thinking

# Claude Code begins its system message with a line for Anthropic's accounts that differs in each request, so
# that no request would share a prefix with the request before.
_BILLING = "x-anthropic-billing-header:"


class _TextBlock(Body):
    type: Literal["text"]
    text: Text


class _SearchResultBlock(Body):
    type: Literal["search_result"]
    content: Annotated[list[_TextBlock], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(block.text for block in self.content)


class _TextSource(Body):
    type: Literal["text"]
    data: Text


class _DocumentBlock(Body):
    type: Literal["document"]
    source: _TextSource

    @property
    def text(self) -> str:
        """Its text."""
        return self.source.data


class _LeftOut(Body):
    """A block that only Anthropic's server can read, or the work of a tool that it ran itself."""

    type: Name


def _written(value: object) -> str | None:
    """The tag of a block that may stand in any message; None for another block."""
    kind = kind_of(value)
    if kind == "document":  # other sources are ids of files
        source = value.get("source") if isinstance(value, dict) else None
        return "a document" if source is None or kind_of(source) == "text" else None
    return {"text": "a text", "search_result": "a result", "tool_reference": "another block"}.get(kind or "")


def _any_block(value: object) -> str | None:
    kind = kind_of(value) or ""
    own = {
        "thinking": "a thought",
        "tool_use": "a call",
        "tool_result": "a result of a call",
        **dict.fromkeys(("tool_addition", "tool_removal"), "a change of tools"),
    }
    if kind in own:
        return own[kind]
    ran = kind.startswith(("server_", "mcp_")) or kind.endswith("_tool_result")
    return "another block" if ran or kind == "redacted_thinking" else _written(value)


_Written = (
    Annotated[_TextBlock, Tag("a text")]
    | Annotated[_SearchResultBlock, Tag("a result")]
    | Annotated[_DocumentBlock, Tag("a document")]
    | Annotated[_LeftOut, Tag("another block")]
)
_Texts = TextOr[Annotated[_Written, told(_written, NOT_TEXT)]]


class _ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text


class _ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: JsonObject


class _ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Texts | None = None
    is_error: bool | None = None


_Block = Annotated[
    _Written
    | Annotated[_ThinkingBlock, Tag("a thought")]
    | Annotated[_ToolUseBlock, Tag("a call")]
    | Annotated[_ToolResultBlock, Tag("a result of a call")]
    | Annotated[ToolChange, Tag("a change of tools")],
    told(_any_block, NOT_TEXT),
]


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: TextOr[_Block]

    def turns(self) -> Iterator[JsonObject]:
        """The chat route's messages for this message: results of tools become messages before other text."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.content
        for block in blocks:
            if isinstance(block, _ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        calls = [
            {"id": b.id, "function": {"name": b.name, "arguments": json.dumps(b.input, ensure_ascii=False)}}
            for b in blocks
            if isinstance(b, _ToolUseBlock)
        ]
        text = _text(blocks)
        thought = "".join(b.thinking for b in blocks if isinstance(b, _ThinkingBlock))
        if text or calls or not any(isinstance(b, _ToolResultBlock | ToolChange) for b in blocks):
            more: JsonObject = {"reasoning_content": thought} if thought else {}
            more |= {"tool_calls": calls} if calls else {}
            yield {"role": self.role, "content": text, **more}

    def left_out(self) -> Iterator[str]:
        """Parts that the prompt leaves out."""
        for i, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(block, _LeftOut):
                yield f"content.{i}.{block.type}"


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "_ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: goes with the type tool, and only with it")
        return self


class _Format(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class _OutputConfig(Body):
    effort: Effort | None = None
    format: _Format | None = None


class CountBody(Body):
    """/v1/messages/count_tokens."""

    without_effect: ClassVar = frozenset({"betas", "inference_geo", "service_tier", "speed"})

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
        for i, message in enumerate(self.messages):
            yield from (f"{prefix}messages.{i}.{path}" for path in message.left_out())

    def _system(self) -> str:
        if not isinstance(self.system, list):
            return self.system or ""
        return _text([block for block in self.system if not getattr(block, "text", "").startswith(_BILLING)])

    def chat(self, **more: Any) -> ChatBody:
        """Convert the request to a body of the chat route. more: further fields. Raises ValidationError."""
        turns = [turn for message in self.messages for turn in message.turns()]
        if system := self._system():
            turns.insert(0, {"role": "system", "content": system})
        value: JsonObject = {"messages": turns, **more}
        # Anthropic's API does the same: the answer goes on with an assistant's message at the end.
        value["continue_final_message"] = self.messages[-1].role == "assistant"
        changes = [b for m in self.messages for b in m.content if isinstance(b, ToolChange)]
        value["tools"] = functions(self.tools or (), changes) or None
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            kinds = {"any": "required", "tool": named}
            value["tool_choice"] = kinds.get(choice.type, choice.type)
            value["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        config = self.output_config or _OutputConfig()
        value["thinking"] = self.thinking
        # Here an effort does not switch thinking on.
        value["chat_template_kwargs"] = config.effort and {"reasoning_effort": config.effort}
        if found := config.format or self.output_format:
            value["response_format"] = {"type": "json_schema", "json_schema": {"schema": found.schema_}}
        chat = ChatBody.model_validate(value)
        return chat.sent_as({"chat_template_kwargs.reasoning_effort": "output_config.effort"})


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

    def conversation(self) -> ChatBody:
        """Convert the request to a body of the chat route. Raises ValidationError."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return self.chat(stop=self.stop_sequences, **{name: getattr(self, name) for name in same})


def _text(content: str | Sequence[object] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (_TextBlock, _SearchResultBlock, _DocumentBlock)
    return "".join(block.text for block in content if isinstance(block, texts))
