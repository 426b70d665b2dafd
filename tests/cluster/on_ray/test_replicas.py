"""The ingress and the replica without a cluster: what goes to another replica, and what ends as an error."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from mtp_jax import EngineStopped
from serve.base.settings import Settings
from serve.http.in_process import AnswerHead, SentRequest

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]' -c constraints.txt")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

EVENTS = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"n")]


class Reply:
    """What a handle returns: parts, and errors among them."""

    def __init__(self, *parts: Any) -> None:
        self.parts, self.cancelled = [*parts], False

    def __aiter__(self) -> "Reply":
        return self

    async def __anext__(self) -> Any:
        if not self.parts:
            raise StopAsyncIteration
        part = self.parts.pop(0)
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A handle of replicas that reply one after the other."""

    def __init__(self, *replies: Reply) -> None:
        self.replies, self.calls = [*replies], list[SentRequest]()
        self.remote = self._remote

    def options(self, **given: Any) -> "Handle":
        assert given == {"stream": True, "method_name": "answer"}
        return self

    def _remote(self, call: SentRequest) -> Reply:
        self.calls.append(call)
        return self.replies[len(self.calls) - 1]


async def ask(
    handle: Handle, body: bytes = b"{}", most: int = 100
) -> tuple[int, Any, bytes, Exception | None]:
    """(status, headers, body, what broke it off) of a request to the ingress."""
    from mtp_jax.cluster.on_ray import replicas

    pieces = [body[:2], body[2:]]

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await asyncio.Event().wait()
        raise AssertionError

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"host", b"localhost")]
    scope |= {"asgi": {"spec_version": "2.4"}}
    settings = Settings("m", max_body_bytes=most)
    response = await replicas.Ingress(handle, settings)(Request(scope, receive))
    error = None
    try:
        await response(scope, receive, send)
    except Exception as raised:
        error = raised
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], sent[0]["headers"], text, error


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    from mtp_jax.cluster.on_ray import replicas

    monkeypatch.setattr(replicas, "_AGAIN_SECONDS", 0)


def test_an_answer_is_handed_on():
    handle = Handle(Reply(AnswerHead(200, EVENTS), b"a", b"b"))
    prompt = "x" * 600
    status, headers, body, error = asyncio.run(ask(handle, json.dumps({"prompt": prompt}).encode(), 1000))
    assert (status, headers, body, error) == (200, [(b"content-type", b"text/event-stream")], b"ab", None)
    (call,) = handle.calls
    assert json.loads(call.body)["prompt"] == prompt
    assert len(call.prefixes) == 2


@pytest.mark.parametrize("lost", [[EngineStopped("gone")], [AnswerHead(200, EVENTS), EngineStopped("gone")]])
def test_what_was_lost_before_the_first_bytes_goes_to_another(lost):
    handle = Handle(Reply(*lost), Reply(*lost), Reply(AnswerHead(200, EVENTS), b"a"))
    status, _, body, error = asyncio.run(ask(handle))
    assert (status, body, error, len(handle.calls)) == (200, b"a", None, 3)


def test_an_actor_that_died_is_a_loss_and_another_error_is_none():
    from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

    handle = Handle(Reply(RayActorError()), Reply(AnswerHead(204, [])))
    assert asyncio.run(ask(handle))[0] == 204
    with pytest.raises(RuntimeError, match="a fault"):
        asyncio.run(ask(Handle(Reply(RuntimeError("a fault")))))


def test_a_stream_that_was_begun_ends_with_an_error_and_not_as_if_it_were_whole():
    reply = Reply(AnswerHead(200, EVENTS), b"data: 1\n\n", EngineStopped("gone"))
    status, _, body, error = asyncio.run(ask(Handle(reply)))
    assert status == 200
    first, last = body.decode().split("\n\n")[:2]
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert isinstance(error, EngineStopped)
    assert reply.cancelled


def test_nobody_is_asked_again_for_ever(monkeypatch):
    from mtp_jax.cluster.on_ray import replicas

    monkeypatch.setattr(replicas, "_MOST_SECONDS_LOST", -1.0)
    status, headers, body, _ = asyncio.run(ask(Handle(Reply(EngineStopped("gone")))))
    assert status == 503
    assert (b"retry-after", b"5") in headers
    assert json.loads(body)["error"]["code"] == "unavailable"


def test_a_body_that_is_too_large_is_not_kept():
    handle = Handle()
    assert asyncio.run(ask(handle, b"x" * 101))[0] == 413
    assert not handle.calls


def replica(app: Any, error: Exception | None = None) -> Any:
    from mtp_jax.cluster.on_ray import replicas

    made: Any = replicas.Replica.__new__(replicas.Replica)
    made._gang, made._served = None, SimpleNamespace(app=app, allm=SimpleNamespace(error=error))
    return made


async def collect(made: Any) -> list[Any]:
    return [part async for part in made.answer(SentRequest("GET", "/", [], b""))]


async def two(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece, more in ((b"a", True), (b"b", False)):
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_replica_answers_until_its_engine_is_lost():
    assert asyncio.run(collect(replica(two))) == [AnswerHead(200, []), b"a", b"b"]
    assert asyncio.run(collect(replica(nothing))) == [AnswerHead(204, [])]
    asyncio.run(replica(two).check_health())
    lost = replica(two, EngineStopped("gone"))
    with pytest.raises(EngineStopped, match="before the first token"):
        asyncio.run(collect(lost))
    with pytest.raises(EngineStopped, match="the engine has failed"):
        asyncio.run(lost.check_health())


def test_a_replica_is_ill_when_a_host_of_its_gang_is_lost():
    def check() -> None:
        raise EngineStopped("rank 1 of the engine has ended")

    made = replica(two)
    made._gang = SimpleNamespace(check=check)
    with pytest.raises(EngineStopped, match="rank 1"):
        asyncio.run(made.check_health())


def test_the_ingress_has_no_jax():
    code = "import sys; sys.modules['jax'] = sys.modules['jaxlib'] = None"
    code += "; import mtp_jax.cluster.on_ray.replicas, mtp_jax.cluster.on_ray.router"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
