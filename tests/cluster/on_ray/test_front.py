"""What the ingress refuses before it reads, parses or keeps a byte of a body."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from mtp_jax.cluster.on_ray.front import Front
from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.http.in_process import SentRequest

SETTINGS = Settings(
    "m",
    api_keys=("user",),
    admin_key="admin",
    max_body_bytes=100,
    body_seconds=0.05,
    allowed_origins=("https://chat.example.com",),
)
KEY, HOST = (b"authorization", b"Bearer user"), (b"host", b"localhost")
PAGE = (b"origin", b"https://chat.example.com")


class Asked:
    """A request, and how often its body was asked for. pieces: of the body; None: it never comes."""

    def __init__(
        self, headers: list[tuple[bytes, bytes]], pieces: list[bytes | None], **changes: Any
    ) -> None:
        self.pieces, self.reads = pieces, 0
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"a=b"}
        scope |= {"headers": [HOST, *headers]} | changes
        self.request = Request(scope, self.receive)

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        piece = self.pieces.pop(0)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    def call(self) -> SentRequest:
        return asyncio.run(Front(SETTINGS).call(self.request))


def test_a_request_is_handed_on_as_it_is():
    asked = Asked([KEY], [b'{"prompt":', b' "x"}'])
    call = asked.call()
    assert (call.method, call.path, call.query) == ("POST", "/v1/completions", b"a=b")
    assert (call.headers, call.body) == ([HOST, KEY], b'{"prompt": "x"}')


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ([], "/v1/completions", 401),
        ([(b"x-api-key", b"other")], "/v1/completions", 401),
        ([KEY], "/update_weights_from_disk", 401),
        ([KEY, (b"content-length", b"101")], "/v1/completions", 413),
        ([KEY, (b"content-encoding", b"gzip")], "/v1/completions", 415),
        ([KEY, (b"x", b"y" * 20_000)], "/v1/completions", 431),
        ([KEY, (b"origin", b"https://evil.example.com")], "/v1/completions", 403),
    ],
)
def test_what_its_head_refuses_is_not_read(headers, path, status):
    asked = Asked(headers, [b"x" * 100], path=path)
    with pytest.raises(ApiError) as refused:
        asked.call()
    assert (refused.value.status, asked.reads) == (status, 0)


def test_a_body_that_is_longer_than_it_says_is_not_kept():
    asked = Asked([KEY, (b"content-length", b"1")], [b"x" * 60] * 10)
    with pytest.raises(ApiError) as refused:
        asked.call()
    assert (refused.value.status, asked.reads) == (413, 2)


def test_a_body_that_never_ends_is_not_waited_for():
    with pytest.raises(ApiError) as refused:
        Asked([KEY], [b"{", None]).call()
    assert refused.value.status == 408


def test_probes_and_browsers_that_ask_need_no_key():
    assert Asked([], [b""], method="GET", path="/health").call().path == "/health"
    asks = [PAGE, (b"access-control-request-method", b"POST")]
    asked = Asked(asks, [b"x" * 1000], method="OPTIONS")
    assert (asked.call().body, asked.reads) == (b"", 0)


def test_pages_of_allowed_origins_may_read_why_they_are_refused():
    front = Front(SETTINGS)
    refused = front.refused(Asked([PAGE], []).request, ApiError(401, "no"))
    assert refused.headers["access-control-allow-origin"] == "https://chat.example.com"
    other = front.refused(Asked([(b"origin", b"https://evil.example.com")], []).request, ApiError(403, "no"))
    assert "access-control-allow-origin" not in other.headers
