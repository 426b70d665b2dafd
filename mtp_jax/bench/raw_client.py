"""Completion requests over bare sockets: a client that takes as little of the machine as it can.

What ``client`` measures is what a client sees; here the client must not weigh on what is measured.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Seconds from the request's first byte to the answer's last, the status (0: none), what followed it."""

    seconds: float
    status: int
    body: bytes


class Exchange(asyncio.Protocol):
    """One connection for one request; ``send``, and ``answer`` is done when the server closes it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pieces: list[bytes] = []
        self._began = self._ended = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        """Of ``post``."""
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._pieces.append(data)
        self._ended = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        head, _, body = b"".join(self._pieces).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if body and exc is None else 0
        self.answer.set_result(Answer(self._ended - self._began, status, body))


async def connect(host: str, port: int) -> Exchange:
    """An open connection."""
    _, exchange = await asyncio.get_running_loop().create_connection(Exchange, host, port)
    return exchange


def post(host: str, port: int, body: dict[str, Any]) -> bytes:
    """The bytes of a request for a completion."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
