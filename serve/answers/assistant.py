"""A call of a route whose answers consist of blocks: OpenAI's Responses and Anthropic's Messages."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, RequestOutput
from serve.answers.asking import Asked
from serve.answers.blocks import Blocks, Change
from serve.answers.generation import check, finals, outputs
from serve.answers.inputs import Inputs
from serve.answers.reasoning import ThoughtTokens, may_think
from serve.answers.turn import Turn
from serve.base.errors import ApiError
from serve.base.sse import EventStream, event
from serve.base.state import Server
from serve.bodies.reading import warning


class AssistantCall(ABC):
    """A conversation's answer, whole or as events. A route says what blocks look like."""

    def __init__(self, server: Server, request: Request, asked: Asked, stream: bool) -> None:
        self.server, self.request, self._asked, self._stream = server, request, asked, stream
        self.blocks, self._inputs = Blocks(asked.custom), Inputs(asked.custom)
        self._turn = Turn(asked.thinking, may_think(server.tokenizer), asked.use)
        self._thought = ThoughtTokens(server.tokenizer, asked.use)
        self._last: RequestOutput | None = None

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The whole, once it has ended."""

    @abstractmethod
    def begin(self) -> Iterable[dict[str, Any]]:
        """The events before the first block. An event's ``type`` is its name."""

    @abstractmethod
    def change(self, change: Change) -> Iterable[dict[str, Any]]:
        """The events of a change of a block."""

    @abstractmethod
    def end(self) -> Iterable[dict[str, Any]]:
        """The events after the last block."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """The event of a failure."""

    async def respond(self) -> Response:
        """The response."""
        if self._stream:
            return EventStream(self._events(), warning(self.request), error=self._failed, done=b"")
        (output,) = await finals(self.server, self.request, self._asked.streams)
        self._take(output)
        self.blocks.finish()
        return Response(to_json(self.answer()), headers=warning(self.request), media_type="application/json")

    @property
    def completion(self) -> CompletionOutput | None:
        """The newest output; None before the first."""
        return self._last.outputs[0] if self._last else None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's."""
        return self._turn.finish_reason(self.completion) if self.completion else None

    @property
    def weight_version(self) -> str | None:
        """Of the weights that made the answer; None before the first output."""
        return self._last.weight_version if self._last else None

    @property
    def counts(self) -> dict[str, int]:
        """Tokens: of the ``prompt``, ``cached`` ones of it, of the ``output``, of the ``thought`` in it."""
        prompt = len(self._last.prompt_token_ids) if self._last else self._asked.streams[0].prompt_tokens
        output = self.completion.num_tokens if self.completion else 0
        thinks = any(block.kind == "thought" for block in self.blocks.all)
        return {
            "prompt": prompt,
            "cached": self._last.cached_tokens if self._last else 0,
            "output": output,
            "thought": self._thought.count if thinks else 0,
        }

    def _take(self, output: RequestOutput) -> list[Change]:
        self._last = output
        self._thought.push(output.outputs[0].token_ids)
        return self.blocks.push(self._inputs.push(self._turn.push(output.outputs[0])))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield _named(self.begin())
        async with aclosing(outputs(self.server, self.request, self._asked.streams)) as growing:
            async for _, output in growing:
                check([output], 1)
                changes = self._take(output)
                if changes:
                    yield _named(e for change in changes for e in self.change(change))
        closing = [e for change in self.blocks.finish() for e in self.change(change)]
        yield _named([*closing, *self.end()])

    def _failed(self, error: ApiError) -> bytes:
        return _named([self.error(error)])


def _named(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"event: " + e["type"].encode() + b"\n" + event(e) for e in events)
