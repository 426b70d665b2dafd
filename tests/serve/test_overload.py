"""A full queue refuses a request by its headers, after access control, and nothing else."""

import asyncio
import gc
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from mtp_jax import LLM, JsonObject, Overloaded, Tokenizer
from mtp_jax.api.admission import Admission
from mtp_jax.api.local import local_runner
from serve.base.errors import ApiError, as_api_error
from serve.bodies import reading
from serve.bodies.counting import MAX_NAMES, MAX_OBJECTS, MAX_VALUES, Objects, check_text
from serve.routes import completions
from tests.serve.conftest import Running, start, wait_until

SHORT = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")


def status_of(connection: socket.socket) -> bytes:
    """Of one response, which is read to its end; empty if the connection ends instead."""
    head, _, body = (first := connection.recv(4096)).partition(b"\r\n\r\n")
    if not first:
        return b""
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    missing = int(length.removeprefix(b"content-length: ")) - len(body)
    while missing > 0:
        missing -= len(connection.recv(missing))
    return head.split(b" ")[1]


@pytest.fixture
def full(server: Running, monkeypatch: pytest.MonkeyPatch):
    """(admission, the reservation that fills it)."""
    admission = Admission(1, 10**6)
    reservation = admission.reserve(1, 1)
    monkeypatch.setattr(server.allm._submissions, "admission", admission)
    yield admission, reservation
    admission.release(reservation)


def test_a_full_queue_says_what_did_not_fit():
    admission = Admission(4, 100)
    reservation = admission.reserve(3, 80)
    with pytest.raises(Overloaded, match="3 requests wait and 2 more came at once; at most 4 may"):
        admission.reserve(2, 1)
    with pytest.raises(Overloaded, match="80 prompt tokens wait and 30 more came; at most 100 may"):
        admission.reserve(1, 30)
    admission._finishes.extend((0.0, 3.3))  # an answer in as many seconds
    with pytest.raises(Overloaded, match=r"; try again in 4 s$") as caught:
        admission.reserve(2, 1)
    assert as_api_error(caught.value).headers == {"Retry-After": "4"}
    admission.release(reservation)


@pytest.mark.parametrize("route", ROUTES)
def test_requests_are_refused_unread(full, client, server: Running, route):
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + b"{ no JSON")
        with connection.makefile("rb") as whole:
            lines, _, body = whole.read().partition(b"\r\n\r\n")
    status, *fields = lines.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ") for line in fields)}
    assert status == "HTTP/1.1 503 Service Unavailable"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert len(headers["x-request-id"]) == 32
    error = json.loads(body)["error"]
    assert error["code"] == "overloaded"
    assert "1 requests wait; at most 1 may" in error["message"]
    counted = f'mtp_jax:http_responses_total{{model_name="tiny",route="{route}",status="503"}}'
    assert counted in client.get("/metrics").text


_LONG = "word " * 1000
_CHAT = {"messages": [{"role": "user", "content": _LONG}], "max_tokens": 4}
_TOOL = {"type": "function", "function": {"name": "a", "description": _LONG, "parameters": {}}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": _LONG}),
        ("/v1/completions", {"prompt": _LONG, "truncate_prompt_tokens": 4}),
        ("/v1/chat/completions", _CHAT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [_TOOL]}),
        ("/v1/responses", {"input": _LONG}),
        ("/v1/responses/input_tokens", {"input": _LONG}),
        ("/v1/messages", {**_CHAT, "model": "tiny"}),
        ("/v1/messages/count_tokens", {"messages": _CHAT["messages"]}),
        ("/tokenize", {"prompt": _LONG}),
        ("/tokenize", {"messages": _CHAT["messages"]}),
    ],
)
def test_long_prompts_are_refused_before_they_are_tokenised(server: Running, monkeypatch, route, body):
    admission = Admission(8, 1000)
    monkeypatch.setattr(server.allm._submissions, "admission", admission)
    monkeypatch.setattr(type(server.allm), "_state", lambda *args: pytest.fail("was tokenised"))
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: pytest.fail("was tokenised"))
    reservation = admission.reserve(1, 1)
    answer = server.variant().request("POST", route, json=body)
    assert answer.status_code == 503
    found = re.search(r"1 prompt tokens wait and (\d+) more came; at most 1000 may", answer.text)
    assert found
    assert len(_LONG) <= int(found[1]) * 4 <= 1.1 * len(_LONG)
    admission.release(reservation)


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/v1/completions", {"prompt": _LONG}, 400),
        ("/v1/completions", {"prompt": _LONG, "truncate_prompt_tokens": 4, "max_tokens": 1}, 200),
        ("/generate", {"text": _LONG}, 400),
        ("/v1/chat/completions", _CHAT, 400),
        ("/v1/chat/completions", {**_CHAT, "truncate_prompt_tokens": 4}, 200),
        ("/v1/responses", {"input": _LONG}, 400),
        ("/v1/responses/input_tokens", {"input": _LONG}, 200),
        ("/v1/messages", {**_CHAT, "model": "tiny"}, 400),
        ("/v1/messages/count_tokens", {"messages": _CHAT["messages"]}, 200),
        ("/tokenize", {"prompt": _LONG}, 200),
    ],
)
def test_a_text_that_must_be_too_long_is_not_tokenised(server: Running, monkeypatch, route, body, status):
    """A text that is cut, counted or tokenised may have any length."""
    monkeypatch.setattr(Tokenizer, "_least_tokens", lambda self, text: len(text))
    answer = server.variant().post(route, json=body)
    assert answer.status_code == status, answer.text
    assert ("is too long: at least" in answer.text) == (status == 400)


def test_counting_keeps_no_long_answer_waiting(server: Running, monkeypatch):
    """Texts to be counted wait for each other, in the queue; other threads write long answers."""
    counting, go_on = threading.Event(), threading.Event()

    def encode(*args: object, **options: object) -> list[int]:
        counting.set()
        assert go_on.wait(60)
        return [3]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with ThreadPoolExecutor(4) as many, server.client() as client:
        texts = [many.submit(client.post, "/tokenize", json={"prompt": "abc"}) for _ in range(4)]
        assert counting.wait(60)
        wait_until(lambda: server.allm.admission.requests == 4)
        answer = server.call(lambda: asyncio.ensure_future(server.allm.off_loop(lambda: 1)))
        wait_until(answer.done)
        go_on.set()
        assert [text.result().status_code for text in texts] == [200] * 4
    assert server.allm.admission.requests == 0


PART = {"type": "text", "text": ""}
FIELDS = {f"x{i}": None for i in range(16 * MAX_OBJECTS + 80)}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * MAX_OBJECTS}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [PART] * 13}] * (MAX_OBJECTS // 13)},
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [PART] * MAX_OBJECTS}]}),
        ("/v1/messages", {"messages": [], "tools": [{"type": "web_search_20250305"}] * (MAX_OBJECTS + 1)}),
        ("/v1/responses", {"input": "q", "tools": [{"type": "web_search"}] * (MAX_OBJECTS + 1)}),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [PART] * MAX_OBJECTS}]}),
        ("/tokenize", {"prompt": "q", **FIELDS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q", **FIELDS}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{**PART, **FIELDS}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": "q", **FIELDS}]}),
        ("/v1/responses", {"input": [{"type": "web_search_call", **FIELDS}]}),
        ("/v1/messages", {"messages": [], "tools": [{"name": "f", "input_schema": {}, **FIELDS}]}),
        ("/v1/completions", {"prompt": "q", "tools": [], "speculative": FIELDS}),
        (
            "/v1/chat/completions",
            {"messages": [], "tools": [{"type": "function", "function": {"name": "f", **FIELDS}}]},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q", "x": 1}] * 4096, **FIELDS}),
    ],
)
def test_more_objects_than_the_event_loop_has_time_for_are_refused(server: Running, monkeypatch, route, body):
    """Fields that a class does not have are counted with the objects, wherever they stand."""
    counted: list[int] = []

    class Counting(Objects):
        def add(self, value: JsonObject, known: int) -> None:
            counted.append(known)
            super().add(value, known)

    monkeypatch.setattr(reading, "Objects", Counting)
    monkeypatch.setattr(reading, "check_text", lambda text: None)  # which would refuse some of them before
    answer = server.variant(max_body_bytes=2**30).post(route, json=body)
    assert answer.status_code == 400, answer.text
    assert "more than 12,000 messages, parts, calls, tools or fields" in answer.text
    assert len(counted) <= MAX_OBJECTS + 1


ROOM = MAX_VALUES - MAX_NAMES


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (b'{"a": [' + b"[]," * MAX_NAMES + b"[]]}", "120,004 names, lists and objects; at most 120,000"),
        (b'{"a": [' + b"[]," * (MAX_NAMES - 4) + b"[]]}", None),
        (b'{"a": [' + b"[[" * (MAX_NAMES // 2) + b"]]" * (MAX_NAMES // 2) + b"]}", "120,003 names"),
        (b"{" + b'"a": 1,' * MAX_NAMES + b"}", "120,001 names, lists and objects"),
        (
            b'{"a": [' + b"1," * (ROOM + MAX_NAMES) + b"1]}",
            f"{MAX_VALUES + 3:,} values; at most {MAX_VALUES:,}",
        ),
        (b'{"a": [' + b"1," * (MAX_VALUES - 4) + b"1]}", None),
        (b'{"a": "' + b"[{:," * MAX_NAMES + b'"}', None),
        (b'{"a": "' + rb"\\\"[\u0022:" * MAX_NAMES + b'"}', None),
        (b'{"a\\\\": [' + rb'"\\",[],"\"",' * MAX_NAMES + b"1]}", "120,003 names"),
        (b'{"a": "' + b"\\" * (2 * MAX_NAMES + 1) + b'", "b": [' + b"[]," * MAX_NAMES, None),
        (('{"ä": ["' + "ä[,:" * MAX_NAMES + '"]}').encode(), None),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_values_of_a_body_are_counted_before_it_is_parsed(text, refused):
    """Marks within strings are no values, whatever is escaped there."""
    if refused is None:
        check_text(text)
    else:
        with pytest.raises(ApiError, match=re.escape(refused)) as caught:
            check_text(text)
        assert caught.value.status == 413


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"])
def test_bodies_of_too_many_values_are_not_parsed(server: Running, monkeypatch, route):
    monkeypatch.setattr(reading, "from_json", lambda *args, **named: pytest.fail("was parsed"))
    body = b'{"prompt": "q", "metadata": {"a": [' + b"[]," * MAX_NAMES + b"1]}}"
    answer = server.variant().post(route, content=body)
    assert (answer.status_code, "names, lists and objects" in answer.text) == (413, True)


def test_a_prompt_of_a_million_ids_is_read(server: Running):
    answer = server.variant().post("/v1/completions", json={"prompt": [5] * 2**20, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_no_garbage_is_collected_while_a_body_is_read(server: Running):
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if threading.current_thread() is server.thread:
            phases.append(phase)

    lists = b'{"prompt": "q", "metadata": {"a": [' + b"[]," * (MAX_NAMES - 9) + b"1]}, "
    gc.callbacks.append(note)
    try:
        answer = server.variant().post("/v1/completions", content=lists + b'"n": "x"}')
    finally:
        gc.callbacks.remove(note)
    assert answer.status_code == 400
    assert gc.isenabled()
    assert len(phases) <= 4  # before and behind


def test_unknown_fields_of_a_body_are_not_kept(server: Running, monkeypatch):
    read = []
    real = completions.read

    async def keep(*args):
        read.append(await real(*args))
        return read[-1]

    monkeypatch.setattr(completions, "read", keep)
    body = {**SHORT, "metadata": {"a": [[]]}, "odd": "x" * 999}
    answer = server.variant().post("/v1/completions", json=body)
    assert "odd" in answer.headers["warning"]
    assert read[0].model_extra == {}


def test_schemas_and_tokens_are_no_such_objects(client):
    properties = {f"p{i}": {"type": "string"} for i in range(2 * MAX_OBJECTS)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    asked = {"messages": [{"role": "user", "content": "q"}], "tools": [tool], "tool_choice": "none"}
    assert client.post("/tokenize", json=asked).status_code == 200
    assert client.post("/detokenize", json={"tokens": [5] * (2 * MAX_OBJECTS)}).status_code == 200


def test_the_connection_goes_on_and_other_routes_answer(full, server: Running):
    admission, reservation = full
    with server.client() as one:
        assert one.post("/v1/completions", json=SHORT).status_code == 503
        assert one.get("/health").status_code == 200
        assert one.get("/v1/models").status_code == 200
        assert one.post("/v1/completions", json=SHORT).status_code == 503
        admission.release(reservation)
        assert one.post("/v1/completions", json=SHORT).status_code == 200


def test_a_refused_connection_may_wait_with_its_next_request(fresh: LLM, monkeypatch: pytest.MonkeyPatch):
    """As long as one that got an answer: the time for headers begins with them."""
    with start(fresh, body_seconds=1.5) as running:
        admission = Admission(1, 10**6)
        admission.reserve(1, 1)
        monkeypatch.setattr(running.allm._submissions, "admission", admission)
        request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(request)
                assert status_of(connection) == b"503"
                time.sleep(2)
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost")
            assert connection.recv(4096) == b""


def test_refused_connections_are_closed_when_nothing_more_comes(
    full, server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server.uvicorn.config, "timeout_keep_alive", 0.5)
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        assert status_of(connection) == b"503"
        assert connection.recv(4096) == b""


def test_a_request_in_pieces_is_refused_by_its_headers(full, server: Running):
    """The body that follows is not taken for another request."""
    body = json.dumps(SHORT).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for _ in range(2):
            connection.sendall(head)
            assert status_of(connection) == b"503"
            connection.sendall(body)


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
    ("headers", "status"),
    [
        ({"authorization": "Bearer secret"}, 503),
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer secret", "host": "elsewhere.example"}, 403),
        ({"authorization": "Bearer secret", "origin": "http://elsewhere.example"}, 403),
        ({"authorization": "Bearer secret", "x": "y" * 20_000}, 431),
    ],
)
def test_access_control_comes_before_the_queue(full, server: Running, headers, status):
    locked = server.variant(api_keys=("secret",))
    assert locked.post("/v1/completions", json=SHORT, headers=headers).status_code == status


def test_a_refusal_has_the_name_that_the_client_gave(full, server: Running):
    with server.client() as one:
        answer = one.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (503, "mine-1")


def test_a_burst_over_sockets_is_answered_or_refused_in_full(server: Running, client, monkeypatch):
    """Every connection gets a complete answer: the text, or OpenAI's error object with Retry-After."""
    monkeypatch.setattr(server.allm._submissions, "admission", Admission(4, 10**6))
    expected = client.post("/v1/completions", json=SHORT).json()["choices"]

    async def ask() -> list[httpx2.Response]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits) as asking:
            return await asyncio.gather(*(asking.post("/v1/completions", json=SHORT) for _ in range(200)))

    answers = asyncio.run(ask())
    refused = [a for a in answers if a.status_code == 503]
    accepted = [a for a in answers if a.status_code == 200]
    assert len(refused) + len(accepted) == 200
    assert len(accepted) >= 4
    assert refused
    assert all(a.json()["choices"] == expected for a in accepted)
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "overloaded"


def test_the_garbage_collector_leaves_programs_alone(real: Running):
    """A look at all of them would hold up everybody."""
    programs = local_runner(real.allm.llm.engine).programs
    assert gc.is_tracked(programs)
    assert not any(looked_at is programs for looked_at in gc.get_objects())
