"""Requests to the ASGI application from within its process: from batches, and from a router's replicas."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

HeaderList = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class SentRequest:
    """A request as it travels between processes.

    Attributes:
        query: text behind the question mark.
        client: address and port of the client.
        prefixes: digests of the prompt's beginnings, for routers (``mtp_jax/cluster/on_ray/prefixes.py``).
    """

    method: str
    path: str
    headers: HeaderList
    body: bytes
    query: bytes = b""
    client: tuple[str, int] | None = None
    prefixes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class AnswerHead:
    """The head of an answer."""

    status: int
    headers: HeaderList


@dataclass(frozen=True)
class Answer:
    """A server's answer: status, its id for the request, the JSON body, the warning if there is one."""

    status: int
    request_id: str
    body: Any
    warning: str = ""


async def stream(app: ASGIApp, call: SentRequest) -> AsyncGenerator[AnswerHead | bytes, None]:
    """The answer's head, then pieces of its body as they come. Ending the iteration disconnects."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": call.client,
        "server": None,
        "state": {},
    }
    unread, gone, sent = [call.body], asyncio.Event(), asyncio.Queue[Message | None]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    answering = asyncio.ensure_future(app(scope, receive, sent.put))
    answering.add_done_callback(lambda _: sent.put_nowait(None))
    complete = False
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield AnswerHead(message["status"], list(message["headers"]))
                continue
            complete = not message.get("more_body", False)
            if body := message.get("body"):
                yield body
        if not complete:  # else Starlette has answered 500, and raises the error again for servers to log
            answering.result()
    finally:
        gone.set()
        answering.exception() if answering.done() and not answering.cancelled() else None


async def post(app: ASGIApp, url: str, body: bytes) -> Answer:
    """The whole answer to a JSON body, as a client over HTTP would get it."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    head, parts = AnswerHead(500, []), []
    async with aclosing(stream(app, SentRequest("POST", url, headers, body))) as answer:
        async for part in answer:
            if isinstance(part, AnswerHead):
                head = part
            else:
                parts.append(part)
    given = dict(head.headers)
    name, warning = (given.get(key, b"").decode() for key in (b"x-request-id", b"warning"))
    return Answer(head.status, name, json.loads(b"".join(parts)), warning)
