"""A full queue refuses whole requests before they are taken apart, and nothing else."""

import asyncio
import gc
import json
import socket
import time

import pytest

from mtp_jax import LLM
from mtp_jax.api.admission import Admission
from mtp_jax.api.local import local_runner
from serve.app import make_app
from serve.overload import ROUTES, Overload
from serve.security import MOST_HEADER_BYTES
from serve.settings import Settings
from serve.turns import Turns
from tests.serve.conftest import Running, start

SHORT = {"prompt": "abc", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def full(server: Running, monkeypatch: pytest.MonkeyPatch):
    """(admission, the place that fills it)."""
    admission = Admission(1, 10**6)
    place = admission.take(1, 1)
    monkeypatch.setattr(server.allm, "admission", admission)
    yield admission, place
    admission.leave(place)


@pytest.mark.parametrize("route", ROUTES)
def test_whole_requests_are_refused_unread(full, client, server: Running, route):
    """Sent in one piece, as not every client does."""
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + b"{ no JSON")
        with connection.makefile("rb") as whole:
            told, _, body = whole.read().partition(b"\r\n\r\n")
    status, *lines = told.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ") for line in lines)}
    assert status == "HTTP/1.1 503 Service Unavailable"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert len(headers["x-request-id"]) == 32
    error = json.loads(body)["error"]
    assert error["code"] == "overloaded"
    assert "1 requests wait, 1 may" in error["message"]
    counted = f'mtp_jax:http_responses_total{{model_name="tiny",route="{route}",status="503"}}'
    assert counted in client.get("/metrics").text


def test_the_connection_goes_on_and_other_routes_answer(full, server: Running):
    admission, place = full
    with server.client() as one:
        assert one.post("/v1/completions", json=SHORT).status_code == 503
        assert one.get("/health").status_code == 200
        assert one.post("/tokenize", json={"prompt": "abc"}).status_code == 200
        assert one.post("/v1/completions", json=SHORT).status_code == 503
        admission.leave(place)
        assert one.post("/v1/completions", json=SHORT).status_code == 200


def test_a_refused_connection_may_wait_with_its_next_request(fresh: LLM, monkeypatch: pytest.MonkeyPatch):
    """As long as one that got an answer: the time for headers begins with them."""
    running = start(fresh, body_seconds=1.5)
    try:
        admission = Admission(1, 10**6)
        admission.take(1, 1)
        monkeypatch.setattr(running.allm, "admission", admission)
        request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(request)
                assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
                time.sleep(2)
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost")
            assert connection.recv(4096) == b""
    finally:
        running.stop()


def test_refused_connections_are_closed_when_nothing_more_comes(
    full, server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server.uvicorn.config, "timeout_keep_alive", 0.5)
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert connection.recv(4096) == b""


def test_a_request_in_pieces_is_refused_once_it_is_there(full, server: Running):
    body = json.dumps(SHORT).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")


def test_refusals_tell_how_the_queue_is_now(full, server: Running):
    """What a burst gets is made once; what changes is told all the same."""
    admission, _ = full
    overload = Overload(server.allm, make_app(server.allm, Settings("tiny")))
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    first, second = (server.call(lambda: overload.refusal(request)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[0] != second[0]  # names of their own
    assert first[0].partition(b"\r\n\r\n")[2] == second[0].partition(b"\r\n\r\n")[2]
    admission.max_requests = 2
    place = admission.take(1, 1)
    third = server.call(lambda: overload.refusal(request))
    admission.leave(place)
    assert third is not None
    assert b"2 requests wait, 2 may" in third[0]


def test_a_burst_that_is_read_in_one_go(server: Running, monkeypatch: pytest.MonkeyPatch):
    """Nobody has a place yet when the last of them is refused."""
    monkeypatch.setattr(server.allm, "admission", Admission(3, 10**6))
    overload = Overload(server.allm, make_app(server.allm, Settings("tiny")))
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    found = server.call(lambda: [overload.refusal(request) for _ in range(50)])
    assert [answer is None for answer in found] == [True] * 3 + [False] * 47
    server.call(lambda: None)
    assert server.call(lambda: overload.refusal(request)) is None


def test_who_wants_the_connection_closed_gets_that(full, server: Running):
    request = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 503 ")  # to the end


@pytest.mark.parametrize(
    ("headers", "answered"),
    [
        (b"Host: localhost\r\nAuthorization: Bearer secret", True),
        (b"host:localhost:8000\r\nauthorization:bearer secret ", True),
        (b"Host: localhost", False),
        (b"Host: localhost\r\nAuthorization: Bearer wrong", False),
        (b"Host: elsewhere.example\r\nAuthorization: Bearer secret", False),
        (b"Host: localhost\r\nAuthorization: Bearer secret\r\nOrigin: http://elsewhere.example", False),
        (b"Host: localhost\r\nAuthorization: Bearer secret\r\nX-Folded: a\r\n b", False),
        (b"Host: localhost\r\nAuthorization: Bearer secret\r\nno colon", False),
        (b"Host: localhost\r\nAuthorization: Bearer secret\r\n" + b"x" * 10**6, False),
        (b"Host: localhost\r\nAuthorization: Bearer secret\r\nX: " + b"x" * MOST_HEADER_BYTES, False),
    ],
)
def test_whom_the_guard_refuses_is_not_told_of_the_queue(full, server: Running, headers, answered):
    """Those go the usual way, where the guard meets them."""
    overload = Overload(server.allm, make_app(server.allm, Settings("tiny", api_keys=("secret",))))
    request = b"POST /generate HTTP/1.1\r\n" + headers + b"\r\nContent-Length: 2\r\n\r\n{}"
    assert (server.call(lambda: overload.refusal(request)) is not None) == answered


def test_a_refusal_has_the_name_that_the_client_gave(full, server: Running):
    with server.client() as one:
        answer = one.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (503, "mine-1")


def test_who_waits_for_a_turn_counts(server: Running, monkeypatch: pytest.MonkeyPatch):
    """Between being read and taking a place."""
    monkeypatch.setattr(server.allm, "admission", Admission(2, 10**6))
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"

    async def found() -> list[bool]:
        guard = make_app(server.allm, Settings("tiny"))
        overload = Overload(server.allm, guard)
        waiting = [asyncio.create_task(guard.turns.next()) for _ in range(2)]
        await asyncio.sleep(0)
        refused = [overload.refusal(request) is not None]
        await asyncio.gather(*waiting)
        return [*refused, overload.refusal(request) is not None]

    assert asyncio.run(found()) == [True, False]


def test_sockets_are_read_between_turns():
    """However many requests wait, the loop looks at its sockets before each."""

    async def run() -> list[str]:
        turns, seen = Turns(), []
        mine, other = socket.socketpair()
        mine.setblocking(False)
        with mine, other:

            def read() -> None:
                seen.append(mine.recv(1).decode())

            async def go(name: str) -> None:
                await turns.next()
                seen.append(name)
                other.send(name.lower().encode())

            asyncio.get_running_loop().add_reader(mine, read)
            await asyncio.gather(*(go(name) for name in "ABC"))
            while len(seen) < 6:
                await asyncio.sleep(0)
            asyncio.get_running_loop().remove_reader(mine)
        assert turns.waiting == 0
        return seen

    assert asyncio.run(run()) == ["A", "a", "B", "b", "C", "c"]


def test_who_leaves_before_its_turn_does_not_hold_up_the_others():
    async def run() -> int:
        turns = Turns()
        first, second, third = (asyncio.create_task(turns.next()) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)
        return turns.waiting

    assert asyncio.run(run()) == 0


def test_the_garbage_collector_leaves_programs_alone(server: Running):
    """A look at all of them would hold up everybody."""
    programs = local_runner(server.allm.llm.engine).programs
    assert gc.is_tracked(programs)
    assert not any(looked_at is programs for looked_at in gc.get_objects())
