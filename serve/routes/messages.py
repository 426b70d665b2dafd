"""/v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject
from serve.answers.asking import Submitted, ask, counted
from serve.answers.assistant import AssistantCall, named
from serve.answers.blocks import Block, Change
from serve.answers.inputs import arguments
from serve.base.errors import ApiError
from serve.base.ids import new_id
from serve.base.json_answer import JsonAnswer
from serve.base.state import Server
from serve.bodies.client_tools import ClientTools
from serve.bodies.messages import CountBody, MessagesBody
from serve.bodies.reading import read, warning

_NO_THREADS = "thread: this server stores no conversation; leave it out, and send all messages"
# Fields of an error: Anthropic's package then sends all messages again, also in later requests.
_SEND_ALL = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
# An answer that was cut otherwise is an error where it is streamed, or where there is nothing of it.
_ENDS = {**dict.fromkeys(("length", "timeout", "abort"), "max_tokens"), "tool_calls": "tool_use"}


async def messages(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, MessagesBody)
    if body.thread is not None:
        raise ApiError(400, _NO_THREADS, "thread", details=_SEND_ALL)
    tools = body.client_tools

    async def submitted() -> _Messages:
        asked = await ask(server, request, body.conversation(), f"msg_{new_id()}", tools.also)
        return _Messages(server, request, asked, body.stream, tools)

    return await _Messages.respond_to(server, request, body.stream, submitted())


async def count_tokens(server: Server, request: Request) -> Response:
    """The route that counts the tokens of a conversation's prompt."""
    body = await read(server.settings, request, CountBody)
    count = await counted(server, request, body.chat())
    return JsonAnswer({"input_tokens": count}, headers=warning(request))


class _Messages(AssistantCall):
    ping = named({"type": "ping"})  # as Anthropic's

    def __init__(
        self, server: Server, request: Request, asked: Submitted, stream: bool | None, tools: ClientTools
    ) -> None:
        super().__init__(server, request, asked, stream)
        self._tools = tools

    def answer(self) -> JsonObject:
        """A message, without a call that is written by half, which agents would run."""
        shown = [block for block in self.blocks.all if not _is_half(block)]
        if not shown and (failure := self.failure):
            raise failure
        end = self._end()
        if end["stop_reason"] == "tool_use" and not any(block.kind == "call" for block in shown):
            end["stop_reason"] = "end_turn"
        return self._message([self._block(block, block.text) for block in shown], end)

    def begin(self) -> Iterable[JsonObject]:
        """An empty message."""
        yield {
            "type": "message_start",
            "message": self._message([], {"stop_reason": None, "stop_sequence": None}),
        }

    def change(self, change: Change) -> Iterable[JsonObject]:
        """Events of a content block."""
        index = change.block.index
        if change.what == "begin":
            block = self._block(change.block, "")
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

    def end(self) -> Iterable[JsonObject]:
        """The events of the end, with its reason. Raises ApiError for an answer that was cut."""
        if failure := self.failure:
            raise failure
        yield from super().end()
        made_by = {"weight_version": self.weight_version, **self.server.fingerprint}
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage(), **made_by}
        yield {"type": "message_stop"}

    @staticmethod
    def refused(error: ApiError) -> JsonObject:
        """The event of an error, in Anthropic's shape."""
        return error.anthropic

    def _end(self) -> dict[str, str | None]:
        """The stop reason; the route takes no stop tokens, so a stop is a string."""
        stop = self.completion.stop_reason if self.completion else None
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _ENDS.get(self.finish_reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        counts = self.counts  # before the first output the number of cached tokens counts as 0
        return {
            "input_tokens": counts["prompt"] - counts["cached"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts["cached"],
            "output_tokens": counts["output"],
        }

    def _message(self, content: list[JsonObject], end: dict[str, str | None]) -> JsonObject:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.request.state.model,
            "content": content,
            **end,
            "usage": self._usage(),
            "weight_version": self.weight_version,
            **self.server.fingerprint,
        }

    def _block(self, block: Block, text: str) -> JsonObject:
        """A content block with its text so far."""
        match block.kind:
            case "text":
                return {"type": "text", "text": text}
            case "thought":
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "call" | "custom":  # which this route does not have
                tool = self._tools.identity(block.name)
                toolset = {"toolset_name": tool.namespace} if tool.namespace else {}
                called = {"id": block.id, "name": tool.name, **toolset, "input": arguments(text) or {}}
                return {"type": "tool_use", **called}


def _is_half(block: Block) -> bool:
    """Whether a block is a call whose arguments the end of the answer has cut."""
    return block.kind == "call" and not block.ended and arguments(block.text) is None
