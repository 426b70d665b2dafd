"""/v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve.assistant import AssistantCall
from serve.blocks import Block, Change
from serve.bodies import read, warning
from serve.chat import Asked, ChatPrompt, ask
from serve.errors import ApiError
from serve.fields import Body, Name, Stops, Text, bounds, form
from serve.ids import new_id
from serve.schema import ChatBody
from serve.state import Server
from serve.tools import FunctionName

_ENDS = {"length": "max_tokens", "tool_calls": "tool_use"}


class _TextBlock(Body):
    type: Literal["text"]
    text: Text


_Texts = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[list[_TextBlock], Field(fail_fast=True), Tag("a list")],
    Discriminator(form),
]


class _ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text


class _ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]


class _ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Texts | None = None
    is_error: bool | None = None


_Block = Annotated[
    _TextBlock | _ThinkingBlock | _ToolUseBlock | _ToolResultBlock, Field(discriminator="type")
]


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("a string")] | Annotated[list[_Block], Field(fail_fast=True), Tag("a list")],
        Discriminator(form),
    ]

    def turns(self) -> Iterator[dict[str, Any]]:
        """As the chat route has them: results of tools are messages of their own, before other text."""
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
        text = "".join(b.text for b in blocks if isinstance(b, _TextBlock))
        thought = "".join(b.thinking for b in blocks if isinstance(b, _ThinkingBlock))
        if text or calls or not any(isinstance(b, _ToolResultBlock) for b in blocks):
            more: dict[str, Any] = {"reasoning_content": thought} if thought else {}
            more |= {"tool_calls": calls} if calls else {}
            yield {"role": self.role, "content": text, **more}


class _Tool(Body):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "_ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: goes with the type tool, and only with it")
        return self


class _Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, bounds("max_thinking_tokens")] | None = None


class CountBody(Body):
    """/v1/messages/count_tokens."""

    model: Name | None = None
    messages: Annotated[list[_Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    system: _Texts | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None

    def chat(self, **more: Any) -> ChatBody:
        """What the chat route takes for it. Raises ValidationError."""
        turns = [turn for message in self.messages for turn in message.turns()]
        if self.system:
            turns.insert(0, {"role": "system", "content": _text(self.system)})
        value: dict[str, Any] = {"messages": turns, **more}
        if self.tools:
            value["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "parameters": tool.input_schema,
                        **({"description": tool.description} if tool.description else {}),
                        **({"strict": True} if tool.strict else {}),
                    },
                }
                for tool in self.tools
            ]
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            kinds = {"any": "required", "tool": named}
            value["tool_choice"] = kinds.get(choice.type, choice.type)
            value["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if thinking := self.thinking:
            on = thinking.type != "disabled"
            value["chat_template_kwargs"] = {"thinking": on, "enable_thinking": on}
            value["max_thinking_tokens"] = thinking.budget_tokens
        return ChatBody.model_validate(value)


class MessagesBody(CountBody):
    """/v1/messages."""

    max_tokens: Annotated[int, bounds("max_tokens")]
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None

    def conversation(self) -> ChatBody:
        """What the chat route takes for it. Raises ValidationError."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return self.chat(stop=self.stop_sequences, **{name: getattr(self, name) for name in same})


def _text(content: str | list[_TextBlock] | None) -> str:
    return content or "" if isinstance(content, str | None) else "".join(block.text for block in content)


async def messages(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, MessagesBody)
    asked = await ask(server, body.conversation())
    return await _Messages(server, request, asked, body.stream is True).respond()


async def count_tokens(server: Server, request: Request) -> Response:
    """How long the prompt of a conversation is."""
    body = await read(server.settings, request, CountBody)
    prompt = ChatPrompt(server, body.chat())
    count = len(await server.allm.off_loop(prompt))
    return Response(to_json({"input_tokens": count}), headers=warning(request), media_type="application/json")


class _Messages(AssistantCall):
    def __init__(self, server: Server, request: Request, asked: Asked, stream: bool) -> None:
        super().__init__(server, request, asked, stream)
        self._id = f"msg_{new_id()}"

    def answer(self) -> dict[str, Any]:
        """A message."""
        content = [_block(block, block.text) for block in self.blocks.all]
        return self._message(content, self._end())

    def begin(self) -> Iterable[dict[str, Any]]:
        """An empty message."""
        yield {
            "type": "message_start",
            "message": self._message([], {"stop_reason": None, "stop_sequence": None}),
        }

    def change(self, change: Change) -> Iterable[dict[str, Any]]:
        """Events of a content block."""
        index = change.block.index
        if change.what == "begin":
            block = _block(change.block, "")
            yield {"type": "content_block_start", "index": index, "content_block": block}
        elif change.what == "grow":
            kind, key = {
                "text": ("text_delta", "text"),
                "thought": ("thinking_delta", "thinking"),
                "call": ("input_json_delta", "partial_json"),
            }[change.block.kind]
            delta = {"type": kind, key: change.text}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        else:
            yield {"type": "content_block_stop", "index": index}

    def end(self) -> Iterable[dict[str, Any]]:
        """How it ended."""
        made_by = {"weight_version": self.weight_version}
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage(), **made_by}
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> dict[str, Any]:
        """Anthropic's."""
        return error.anthropic

    def _end(self) -> dict[str, str | None]:
        """Why the message ended; the route takes no stop tokens, so what stopped it can only be a string."""
        stop = self.completion.stop_reason if self.completion else None
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _ENDS.get(self.finish_reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        counts = self.counts
        return {
            "input_tokens": counts["prompt"] - counts["cached"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts["cached"],
            "output_tokens": counts["output"],
        }

    def _message(self, content: list[dict[str, Any]], end: dict[str, str | None]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.server.settings.model_name,
            "content": content,
            **end,
            "usage": self._usage(),
            "weight_version": self.weight_version,
        }


def _block(block: Block, text: str) -> dict[str, Any]:
    """A content block with so much of its text."""
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(text)}


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object; of a call that was cut, or whose arguments are no object, none."""
    try:
        found = json.loads(text)
        to_json(found)  # which nests less deep
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
