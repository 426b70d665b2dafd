"""A full queue's answer to a request that has not been taken apart.

Parsing, routing and checking take most of a millisecond; in a burst of hundreds that is what everybody waits
for. So a whole request for text, as it came from the socket, is refused by its first line while the queue
takes nobody. All others go the usual way, and are refused there.
"""

import asyncio
import logging
import re
import time
from functools import lru_cache

from pydantic_core import to_json

from mtp_jax import AsyncLLM, Overloaded
from serve.errors import as_api_error
from serve.ids import new_id
from serve.security import MOST_HEADER_BYTES, Guard, Headers

ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")
_ACCESS = logging.getLogger("serve.access")
_FIRST_LINE = re.compile(rb"POST (%s) HTTP/1\.1\r\n" % b"|".join(route.encode() for route in ROUTES))


class Overload:
    """Answers for an ``AsyncLLM`` whose queue is full."""

    def __init__(self, allm: AsyncLLM, guard: Guard) -> None:
        """guard: of the requests that are served; whom it would refuse is not told of the queue."""
        self._allm, self._guard = allm, guard
        self._read = 0  # served requests that do not wait for their turn yet

    def refusal(self, data: bytes) -> tuple[bytes, bool] | None:
        """The response to what just came on an idle connection, and whether to close; None: serve it.

        A request of which a part is still to come is served: closing on it could lose the answer.
        """
        began = time.perf_counter()
        first = _FIRST_LINE.match(data)
        if first is None:
            return None
        overloaded = self._allm.admission.overloaded(self._read + self._guard.turns.waiting)
        if overloaded is None:
            self._expect_one()
            return None
        head, _, sent = data.partition(b"\r\n\r\n")
        if len(head) > MOST_HEADER_BYTES:
            return None
        given, route = Headers.parse(head[first.end() :]), first[1].decode()
        if given is None or given.get(b"content-length") != b"%d" % len(sent):
            return None
        if self._guard.refusal("POST", route, given):
            return None
        status, start, end = _answer(str(overloaded), overloaded.retry_after)
        name = given.name() or new_id()
        self._guard.metrics.responded(route, status)
        _ACCESS.info("%s POST %s %d %.3f s", name, route, status, time.perf_counter() - began)
        return start + name.encode() + end, given.get(b"connection").lower() == b"close"

    def _expect_one(self) -> None:
        """A burst is read in one go, before any of its requests waits for its turn."""

        def waits() -> None:
            self._read -= 1

        self._read += 1
        asyncio.get_running_loop().call_soon(waits)  # just before the task that is made of the request begins


@lru_cache(maxsize=16)
def _answer(message: str, retry_after: float) -> tuple[int, bytes, bytes]:
    """The status, what comes before the request's name, and what after it: made once for a whole burst."""
    error = as_api_error(Overloaded(message, retry_after))
    body = to_json(error.body)
    headers = {
        "content-type": "application/json",
        "content-length": len(body),
        "x-content-type-options": "nosniff",
        **(error.headers or {}),
    }
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    start = f"HTTP/1.1 {error.status} Service Unavailable\r\n{lines}x-request-id: "
    return error.status, start.encode(), b"\r\n\r\n" + body
