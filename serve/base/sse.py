"""Server-sent events, and clients that disconnect before the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mtp_jax import JsonMapping, Stream
from serve.base.errors import ApiError, as_api_error
from serve.base.json_answer import as_json
from serve.watch.access_log import record_of

DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"
"""A comment, which every reader of events skips."""
_KEY = "streams"


# Line ends for httpx and other clients; JSON has them in strings only, where they may be escaped.
_LINE_ENDS = {"\x85": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}


def event(data: JsonMapping) -> bytes:
    """One event of a JSON object."""
    line = as_json(data)
    for character, escaped in _LINE_ENDS.items():
        line = line.replace(character.encode(), escaped)
    return b"data: " + line + b"\n\n"


class EventStream(Response):
    """Sends events as they come; an exception becomes an error event, as the HTTP status is already sent."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        error: Callable[[ApiError], bytes],
        done: bytes,
        ping: bytes,
        ping_seconds: float,
    ) -> None:
        """error: makes the event of an error. done: ends the stream. ping: sent where events keep waiting."""
        self._events, self._error, self._done = events, error, done
        self._ping, self._seconds = ping, ping_seconds
        no_buffers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**no_buffers, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with _pinging(send, self._ping, self._seconds) as send_part:
            try:
                async with aclosing(self._events):
                    async for chunk in self._events:
                        if chunk:
                            await send_part(chunk)
            except Exception as error:
                told = as_api_error(error)
                record_of(scope).error = told.message
                await send_part(self._error(told))
        await send({"type": "http.response.body", "body": self._done, "more_body": False})


@asynccontextmanager
async def _pinging(
    send: Send, ping: bytes, seconds: float
) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Yield a function that sends a part of a body; where none is sent for the seconds, a ping is."""
    now, one_at_a_time = asyncio.get_running_loop().time, asyncio.Lock()
    sent = now()

    async def send_now(body: bytes) -> None:
        nonlocal sent
        await send({"type": "http.response.body", "body": body, "more_body": True})
        sent = now()

    async def send_part(body: bytes) -> None:
        async with one_at_a_time:
            await send_now(body)

    async def pings() -> None:
        while True:
            last = sent
            await asyncio.sleep(last + seconds - now())
            async with one_at_a_time:
                if sent == last:
                    await send_now(ping)

    task = asyncio.create_task(pings())
    try:
        yield send_part
    finally:
        try:
            await one_at_a_time.acquire()  # a ping that has begun is sent
        finally:
            task.cancel()


def streams_of(scope: Scope) -> list[Stream]:
    """Streams that the request of this ASGI scope has queued."""
    return scope.setdefault("state", {}).setdefault(_KEY, [])


def abort_streams(scope: Scope) -> None:
    """Abort the streams that a request has queued and that no reader is left for."""
    for stream in streams_of(scope):
        stream.abort()


@asynccontextmanager
async def aborted_with_client(request: Request) -> AsyncIterator[None]:
    """Abort the streams that the request has queued once the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        request.state.disconnected = True
        abort_streams(request.scope)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
