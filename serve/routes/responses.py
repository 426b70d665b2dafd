"""/v1/responses: OpenAI's Responses API. Nothing is stored: a client sends the whole conversation."""

import time
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject, RequestOutput, Speculation
from serve.answers.asking import Submitted, ask, counted
from serve.answers.assistant import AssistantCall
from serve.answers.blocks import Block, Change
from serve.answers.inputs import arguments
from serve.answers.shapes import time_metrics
from serve.base.errors import ApiError
from serve.base.ids import new_id
from serve.base.json_answer import JsonAnswer
from serve.base.state import Server
from serve.bodies.client_tools import Identity
from serve.bodies.fields import Body
from serve.bodies.reading import read, warning
from serve.bodies.responses import ResponsesBody

_IDS = {"text": "msg_", "thought": "rs_", "call": "fc_", "custom": "ctc_", "whole": "tc_"}
_PARTS = {"text": "output_text", "thought": "reasoning_text"}
# For each kind of block: the name of its events, and the key of its text in the last event and in an item.
_EVENTS = {
    "text": ("output_text", "text"),
    "thought": ("reasoning_text", "text"),
    "call": ("function_call_arguments", "arguments"),
    "custom": ("custom_tool_call_input", "input"),
}
# Fields of a response: as the request has them; as they were used.
_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier",
    "service_tier", "user",
)  # fmt: skip
_USED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


async def responses(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, ResponsesBody)
    name, also = f"resp_{new_id()}", body.client_tools.also

    async def submitted() -> _Responses:
        asked = await ask(server, request, body.conversation(), name, also)
        return _Responses(server, request, asked, body)

    return await _Responses.respond_to(server, request, body.stream, submitted())


async def input_tokens(server: Server, request: Request) -> Response:
    """The route that counts the tokens of a request's prompt."""
    body = await read(server.settings, request, ResponsesBody)
    count = await counted(server, request, body.conversation())
    answer = {"object": "response.input_tokens", "input_tokens": count}
    return JsonAnswer(answer, headers=warning(request))


class _Responses(AssistantCall):
    def __init__(self, server: Server, request: Request, asked: Submitted, body: ResponsesBody) -> None:
        super().__init__(server, request, asked, body.stream)
        self._tools, self._params = body.client_tools, asked.params
        self._body, self._created = body, int(time.time())
        self._ids: dict[int, str] = {}
        self._number = -1
        self._times = body.tells_times(server.settings.request_metrics)
        self._drafts = Speculation()

    def answer(self) -> JsonObject:
        """A response."""
        if failure := self.failure:
            return self._failed(failure)
        reason = {"reason": "max_output_tokens"} if self._cut else None
        return self._response("incomplete" if self._cut else "completed") | {"incomplete_details": reason}

    @property
    def _cut(self) -> bool:
        """Whether a limit or an error has cut the answer."""
        return self.finish_reason not in (None, "stop", "tool_calls")

    def begin(self) -> Iterable[JsonObject]:
        """The events of the beginning."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", {"response": self._response("in_progress")})

    def change(self, change: Change) -> Iterable[JsonObject]:
        """Events of an item, and of its one part; a call has no part."""
        block = change.block
        if self._is_whole(block):
            if change.what != "grow":
                event, status = ("added", "in_progress") if change.what == "begin" else ("done", None)
                item = self._item(block, status)
                yield self._item_event(event, block, item)
            return
        called = block.kind in ("call", "custom")
        of: JsonObject = {"output_index": block.index, "item_id": self._name(block)}
        of |= {} if called else {"content_index": 0}
        scored = {"logprobs": [], **of} if block.kind == "text" else of
        name, key = _EVENTS[block.kind]
        if change.what == "begin":
            empty = self._item(block, "in_progress") | ({key: ""} if called else {"content": []})
            yield self._item_event("added", block, empty)
            if not called:
                yield self._event("response.content_part.added", {"part": _part(block, "")} | of)
        elif change.what == "grow":
            yield self._event(f"response.{name}.delta", {"delta": change.text} | scored)
        else:
            done = {key: block.text}
            if block.kind == "call":
                done["name"] = self._tools.identity(block.name).name
            yield self._event(f"response.{name}.done", done | scored)
            if not called:
                yield self._event("response.content_part.done", {"part": _part(block, block.text)} | of)
            whole = self._item(block)
            yield self._item_event("done", block, whole)

    def take(self, output: RequestOutput) -> RequestOutput:
        """Take an output, and add up the results of drafting."""
        self._drafts += output.speculation
        return super().take(output)

    def end(self) -> Iterable[JsonObject]:
        """The event of the end, with the response. A failure ends no item: agents run calls that end."""
        if failure := self.failure:
            yield self.error(failure)
            return
        yield from super().end()
        answer = self.answer()
        yield self._event(f"response.{answer['status']}", {"response": answer})

    def error(self, error: ApiError) -> JsonObject:
        """The event of a failure, with the response so far."""
        return self._event("response.failed", {"response": self._failed(error)})

    @staticmethod
    def refused(error: ApiError) -> JsonObject:
        """The event of an error, in OpenAI's shape."""
        about = {"code": error.code, "message": error.message, "param": error.param}
        return {"type": "error", "sequence_number": 0, **about}

    def _failed(self, error: ApiError) -> JsonObject:
        """The response of a failure, whose code is one of the two of OpenAI's that are as general."""
        code = "invalid_prompt" if error.status == 400 else "server_error"
        response = self._response("failed")
        for item in response["output"][-1:]:
            item["status"] = "incomplete"
        return response | {"error": {"code": code, "message": error.message}}

    def _event(self, kind: str, fields: JsonObject) -> JsonObject:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item_event(self, what: str, block: Block, item: JsonObject) -> JsonObject:
        return self._event(f"response.output_item.{what}", {"output_index": block.index, "item": item})

    def _name(self, block: Block) -> str:
        """The id of a block's item."""
        kind = "whole" if self._is_whole(block) else block.kind
        return self._ids.setdefault(block.index, _IDS[kind] + new_id())

    def _item(self, block: Block, status: str | None = None) -> JsonObject:
        if status is None:  # the last block is the one that a limit cuts
            status = "incomplete" if self._cut and block is self.blocks.all[-1] else "completed"
        item = {"id": self._name(block), "status": status}
        match block.kind:
            case "text":
                content = [_part(block, block.text)]
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "thought":
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block, block.text)]}
            case "call" | "custom":
                return _call(block, self._tools.identity(block.name)) | item

    def _is_whole(self, block: Block) -> bool:
        """Whether the block is a call whose item has an object for its arguments, so that no text streams."""
        return block.kind == "call" and self._tools.identity(block.name).kind != "function"

    def _response(self, status: str) -> JsonObject:
        body, counts, params = self._body, self.counts, self._params
        options = body.model_dump(by_alias=True, exclude_none=True, include={"reasoning", "text"})
        tools = body.model_dump(by_alias=True, include={"tools"})["tools"]
        choice = body.tool_choice
        choice = choice.model_dump(exclude_unset=True) if isinstance(choice, Body) else choice
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.state.model,
            "output": [self._item(block) for block in self.blocks.all],
            **{name: getattr(body, name) for name in _REPEATED},
            **{name: getattr(params, name) for name in _USED},
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | options.get("reasoning", {}),
            "store": False,
            "text": {"format": {"type": "text"}} | options.get("text", {}),
            "tool_choice": choice or "auto",
            "tools": tools or [],
            "top_logprobs": 0,
            "truncation": "disabled",
            "weight_version": self.weight_version,
            **self.server.fingerprint,
            **({"metrics": time_metrics(self.last[0], self._drafts)} if self._times and self.last else {}),
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": counts["prompt"],
                "input_tokens_details": {"cached_tokens": counts["cached"], "cache_write_tokens": 0},
                "output_tokens": counts["output"],
                "output_tokens_details": {"reasoning_tokens": counts["thought"]},
                "total_tokens": counts["prompt"] + counts["output"],
            },
        }


def _call(block: Block, tool: Identity) -> JsonObject:
    """The item of a call, as the client knows the tool, without its id and status."""
    match tool.kind:
        case "function" | "custom":
            kind = "function_call" if tool.kind == "function" else "custom_tool_call"
            space = {"namespace": tool.namespace} if tool.namespace else {}
            text = {_EVENTS[block.kind][1]: block.text}
            return {"type": kind, "call_id": block.id, "name": tool.name, **space, **text}
        case "tool_search":
            told = {"execution": "client", "arguments": arguments(block.text) or {}}
            return {"type": "tool_search_call", "call_id": block.id, **told}
        case _:
            checks = {"pending_safety_checks": []} if tool.kind == "computer" else {}
            return (arguments(block.text) or {}) | {
                "type": f"{tool.kind}_call",
                "call_id": block.id,
                **checks,
            }


def _part(block: Block, text: str) -> JsonObject:
    part: JsonObject = {"type": _PARTS[block.kind], "text": text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})
