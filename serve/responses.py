"""/v1/responses: OpenAI's Responses API. Nothing is stored: a client sends the whole conversation."""

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from serve.assistant import AssistantCall
from serve.blocks import Block, Change
from serve.bodies import read
from serve.chat import Asked, ask
from serve.errors import ApiError
from serve.fields import Body, Name, Text, bounds, form
from serve.ids import new_id
from serve.schema import CallBody, ChatBody, Effort
from serve.state import Server
from serve.tools import FunctionName

_STORED = ("previous_response_id", "conversation", "prompt", "background")
_OF_OTHER_ROUTES = ("prompt_logprobs", "return_token_ids", "return_token_origins")
_IDS = {"text": "msg_", "thought": "rs_", "call": "fc_"}
_PARTS = {"text": "output_text", "thought": "reasoning_text"}


class _Part(Body):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text


_Content = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[list[_Part], Field(fail_fast=True), Tag("a list")],
    Discriminator(form),
]


class _MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class _CallItem(Body):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text


class _ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: Name
    output: _Content


class _ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[_Part] | None = None
    summary: list[_Part] | None = None


def _kind(value: Any) -> Any:
    return (value.get("type") or "message") if isinstance(value, dict) else "message"


_Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_ResultItem, Tag("function_call_output")]
    | Annotated[_ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class _Tool(Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Named(Body):
    type: Literal["function"]
    name: FunctionName


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class _TextOptions(Body):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(Body):
    effort: Effort | None = None
    summary: str | None = None


class ResponsesBody(CallBody):
    """What the route takes."""

    input: Annotated[
        Annotated[Text, Tag("a string")]
        | Annotated[list[_Item], Field(fail_fast=True, min_length=1, max_length=4096), Tag("a list")],
        Discriminator(form),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, bounds("max_tokens")] | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("a string")]
            | Annotated[_Named, Tag("an object")],
            Discriminator(lambda value: "a string" if isinstance(value, str) else "an object"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    reasoning: _Reasoning | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

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
        """What the chat route takes for it. Raises ValidationError."""
        value = self.model_dump(exclude_none=True, by_alias=True, include=set(ChatBody.model_fields))
        value["messages"] = self._messages()
        value["max_tokens"] = self.max_output_tokens
        keys = ("name", "description", "parameters", "strict")
        value["tools"] = [
            {"type": "function", "function": {k: v for k in keys if (v := getattr(tool, k)) is not None}}
            for tool in self.tools or ()
        ]
        if isinstance(self.tool_choice, _Named):
            value["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text and (found := self.text.format):
            schema = {"name": found.name, "schema": found.schema_} if found.type == "json_schema" else None
            value["response_format"] = {"type": found.type, "json_schema": schema}
        if self.reasoning and self.reasoning.effort:
            value["reasoning_effort"] = self.reasoning.effort
        return ChatBody.model_validate(value)

    def _messages(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        answer: dict[str, Any] | None = None  # the assistant's turn that items are being added to
        for item in self.input:
            if isinstance(item, _MessageItem) and item.role != "assistant":
                answer = None
                turns.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, _ResultItem):
                answer = None
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                if answer is None:
                    answer = {"role": "assistant", "content": ""}
                    turns.append(answer)
                _add(answer, item)
        return turns


def _add(turn: dict[str, Any], item: _MessageItem | _CallItem | _ReasoningItem) -> None:
    """One more item of an assistant's turn."""
    if isinstance(item, _MessageItem):
        turn["content"] += _text(item.content)
    elif isinstance(item, _CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    else:
        thought = _text(item.content or item.summary or [])
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


async def responses(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, ResponsesBody)
    asked = await ask(server, body.conversation())
    return await _Responses(server, request, asked, body).respond()


class _Responses(AssistantCall):
    def __init__(self, server: Server, request: Request, asked: Asked, body: ResponsesBody) -> None:
        super().__init__(server, request, asked, body.stream is True)
        self._body, self._id, self._created = body, f"resp_{new_id()}", int(time.time())
        self._ids: dict[int, str] = {}
        self._number = -1

    def answer(self) -> dict[str, Any]:
        """A response."""
        reason = {"reason": "max_output_tokens"} if self._cut else None
        return self._response("incomplete" if self._cut else "completed") | {"incomplete_details": reason}

    @property
    def _cut(self) -> bool:
        """Whether it has ended before its end."""
        return self.finish_reason not in (None, "stop", "tool_calls")

    def begin(self) -> Iterable[dict[str, Any]]:
        """That it has begun."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def change(self, change: Change) -> Iterable[dict[str, Any]]:
        """Events of an item and of the one part that it has; a call has none."""
        block = change.block
        item, of = self._item(block, "in_progress"), {"output_index": block.index}
        of |= {"item_id": item["id"]} | ({} if block.kind == "call" else {"content_index": 0})
        name = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}[
            block.kind
        ]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.what == "begin":
            empty = item | ({"arguments": ""} if block.kind == "call" else {"content": []})
            yield self._event("response.output_item.added", output_index=block.index, item=empty)
            if block.kind != "call":
                yield self._event("response.content_part.added", part=_part(block, ""), **of)
        elif change.what == "grow":
            yield self._event(f"response.{name}.delta", delta=change.text, **logprobs, **of)
        else:
            done = (
                {"arguments": block.text, "name": block.name}
                if block.kind == "call"
                else {"text": block.text}
            )
            yield self._event(f"response.{name}.done", **done, **logprobs, **of)
            if block.kind != "call":
                yield self._event("response.content_part.done", part=_part(block, block.text), **of)
            whole = self._item(block)
            yield self._event("response.output_item.done", output_index=block.index, item=whole)

    def end(self) -> Iterable[dict[str, Any]]:
        """The whole response."""
        answer = self.answer()
        yield self._event(f"response.{answer['status']}", response=answer)

    def error(self, error: ApiError) -> dict[str, Any]:
        """OpenAI's event."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        if status is None:  # the last one is what a limit cuts
            status = "incomplete" if self._cut and block is self.blocks.all[-1] else "completed"
        item = {"id": self._ids.setdefault(block.index, _IDS[block.kind] + new_id()), "status": status}
        match block.kind:
            case "text":
                content = [_part(block, block.text)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "thought":
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block, block.text)]}
            case "call":
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **call}

    def _response(self, status: str) -> dict[str, Any]:
        body, counts = self._body, self.counts
        same = ("instructions", "max_output_tokens", "temperature", "top_p")
        told = body.model_dump(by_alias=True, include={*same, "reasoning", "text", "tool_choice", "tools"})
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.server.settings.model_name,
            "output": [self._item(block) for block in self.blocks.all],
            **{name: told[name] for name in same},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": told["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "text": told["text"] or {"format": {"type": "text"}},
            "tool_choice": told["tool_choice"] or "auto",
            "tools": told["tools"] or [],
            "truncation": "disabled",
            "weight_version": self.weight_version,
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": counts["prompt"],
                "input_tokens_details": {"cached_tokens": counts["cached"]},
                "output_tokens": counts["output"],
                "output_tokens_details": {"reasoning_tokens": counts["thought"]},
                "total_tokens": counts["prompt"] + counts["output"],
            },
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[block.kind], "text": text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})
