"""A full queue's answer to a request that has not been taken apart.

Parsing, routing and checking take most of a millisecond; in a burst of hundreds that is what everybody waits
for. So a whole request for text, as it came from the socket, is refused by its first line while the queue
takes nobody. All others go the usual way, and are refused there.
"""

import asyncio
import logging
import random
import re
import time

from pydantic_core import to_json

from mtp_jax import AsyncLLM
from serve.errors import as_api_error
from serve.metrics import Metrics
from serve.turns import Turns

ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")
_ACCESS = logging.getLogger("serve.access")
_FIRST_LINE = re.compile(rb"POST (%s) HTTP/1\.1\r\n" % b"|".join(route.encode() for route in ROUTES))
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)


class Overload:
    """Answers for an ``AsyncLLM`` whose queue is full."""

    def __init__(self, allm: AsyncLLM, metrics: Metrics, turns: Turns) -> None:
        """turns: those in which served requests take their places."""
        self._allm, self._metrics, self._turns = allm, metrics, turns
        self._read = 0  # served requests that do not wait for their turn yet

    def refusal(self, data: bytes) -> tuple[bytes, bool] | None:
        """The response to what just came on an idle connection, and whether to close; None: serve it.

        A request of which a part is still to come is served: closing on it could lose the answer.
        """
        began = time.perf_counter()
        first = _FIRST_LINE.match(data)
        if first is None:
            return None
        overloaded = self._allm.admission.overloaded(self._read + self._turns.waiting)
        if overloaded is None:
            self._expect_one()
            return None
        end = data.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(data, 0, end)
        if end < 4 or length is None or int(length[1]) != len(data) - end:
            return None
        error = as_api_error(overloaded)
        body, route = to_json(error.body), first[1].decode()
        name = f"{random.getrandbits(128):032x}"  # no system call: it would let the engine's thread go first
        headers = {
            "content-type": "application/json",
            "content-length": len(body),
            "x-content-type-options": "nosniff",
            "x-request-id": name,
            **(error.headers or {}),
        }
        self._metrics.responded(route, error.status)
        _ACCESS.info("%s POST %s %d %.3f s", name, route, error.status, time.perf_counter() - began)
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        head = f"HTTP/1.1 {error.status} Service Unavailable\r\n{lines}\r\n"
        return head.encode() + body, _CLOSE.search(data, 0, end) is not None

    def _expect_one(self) -> None:
        """A burst is read in one go, before any of its requests waits for its turn."""

        def waits() -> None:
            self._read -= 1

        self._read += 1
        asyncio.get_running_loop().call_soon(waits)  # just before the task that is made of the request begins
