"""A request to a generating route: its outputs become one answer, or events while they grow."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject, RequestOutput, Stream
from serve.answers.generation import check, outputs
from serve.base.errors import ApiError
from serve.base.json_answer import JsonAnswer, as_json
from serve.base.sse import COMMENT, DONE, EventStream, event
from serve.base.state import Server
from serve.bodies.reading import warning

# Answers with more tokens and scores, some milliseconds of work, are written beside the event loop.
_MANY = 1024


def _is_long(outputs: Collection[RequestOutput]) -> bool:
    """Whether writing the answer would hold up the event loop."""
    completions = [c for o in outputs for c in o.outputs]
    scored = [*(c.logprobs for c in completions), *(o.prompt_logprobs for o in outputs)]
    scores = sum(len(row or ()) for rows in scored for row in rows or ())
    return scores + sum(len(c.token_ids) for c in completions) > _MANY


class Call(ABC):
    """Reads the outputs of a request's prompts; a route's subclass renders them.

    Attributes:
        streams: the stream of each prompt.
        last: the newest output of every prompt that has one.
        write: renders an event as bytes; ``done`` ends a stream of events, ``ping`` says that it still waits.
    """

    write: Callable[[JsonObject], bytes] = staticmethod(event)
    done, ping = DONE, COMMENT

    def __init__(
        self, server: Server, request: Request, streams: Sequence[Stream], stream: bool | None
    ) -> None:
        """stream: whether the client asks for events."""
        self.server, self.request, self.streams, self.stream = server, request, streams, stream is True
        self.last: dict[int, RequestOutput] = {}

    @abstractmethod
    def answer(self) -> JsonObject | list[JsonObject]:
        """The JSON value of one answer, once every prompt has ended."""

    @abstractmethod
    def grown(self, prompt: int, output: RequestOutput) -> Iterable[JsonObject]:
        """The events of an output of a prompt; a long output is iterated beside the event loop."""

    def begin(self) -> Iterable[JsonObject]:
        """The events before the first output."""
        return ()

    def end(self) -> Iterable[JsonObject]:
        """The events after the last output."""
        return ()

    def error(self, error: ApiError) -> JsonObject:
        """The event of a failure."""
        return self.refused(error)

    @staticmethod
    def refused(error: ApiError) -> JsonObject:
        """The event of a failure before any other event."""
        return error.body

    def take(self, output: RequestOutput) -> RequestOutput:
        """Record an output; return it without the parts that the client did not request."""
        return output

    async def respond(self) -> Response:
        """The HTTP response: one answer, or a stream of events."""
        if self.stream:
            return self._stream(self.events(), self.error, self.request, self.server)
        async with aclosing(self._outputs()) as growing:
            async for _ in growing:
                pass
        answer = await self._rendered(self.last.values(), lambda: as_json(self.answer()))
        return JsonAnswer(answer, headers=warning(self.request))

    @classmethod
    async def respond_to(
        cls, server: Server, request: Request, stream: bool | None, submitted: "Coroutine[Any, Any, Call]"
    ) -> Response:
        """The HTTP response of a request that is being submitted.

        A stream begins after the seconds of a ping at the latest, as proxies wait no longer; an error that
        is found later is an event.
        """
        coming = asyncio.ensure_future(submitted)
        try:
            await asyncio.wait({coming}, timeout=server.settings.ping_seconds if stream else None)
        except asyncio.CancelledError:
            coming.cancel()
            raise
        if coming.done():
            return await coming.result().respond()

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing((await coming).events()) as parts:
                async for part in parts:
                    yield part

        def error(error: ApiError) -> JsonObject:
            began = coming.done() and not coming.cancelled() and coming.exception() is None
            return coming.result().error(error) if began else cls.refused(error)

        return cls._stream(events(), error, request, server)

    @classmethod
    def _stream(
        cls,
        events: AsyncGenerator[bytes, None],
        error: Callable[[ApiError], JsonObject],
        request: Request,
        server: Server,
    ) -> Response:
        return EventStream(
            events,
            warning(request),
            error=lambda found: cls.write(error(found)),
            done=cls.done,
            ping=cls.ping,
            ping_seconds=server.settings.ping_seconds,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Turns the outputs of a stream into events, in bytes."""
        yield self._written(self.begin())
        async with aclosing(self._outputs()) as growing:
            async for prompt, output in growing:
                yield await self._rendered([output], partial(self._written, self.grown(prompt, output)))
        yield self._written(self.end())

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        came: dict[int, RequestOutput] = {}
        ended = 0
        async with aclosing(outputs(self.server, self.request, self.streams)) as growing:
            async for prompt, output in growing:
                came[prompt] = output
                if getattr(self.request.state, "disconnected", False) and not self.stream:
                    raise ApiError(499, "the client disconnected before its answer was complete")
                ended += output.finished
                # All are looked at once, not for each of them.
                if ended == len(self.streams) or any(c.finish_reason == "error" for c in output.outputs):
                    check(came.values(), len(self.streams), self.server.allm.draining)
                self.last[prompt] = self.take(output)
                yield prompt, self.last[prompt]

    def _written(self, events: Iterable[JsonObject]) -> bytes:
        return b"".join(map(self.write, events))

    async def _rendered(self, outputs: Collection[RequestOutput], render: Callable[[], bytes]) -> bytes:
        """The result of a function over these outputs, beside the event loop if they are long."""
        return await self.server.allm.off_loop(render) if _is_long(outputs) else render()
