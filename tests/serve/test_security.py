"""Classes of attacks and leaks that can concern a server, a test or more for each."""

import ast
import asyncio
import hmac
import json
import logging
import math
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import mtp_jax
from mtp_jax import ConfigError, RequestError, StructuredOutput
from mtp_jax.text import grammar, json_schema
from serve.base.settings import Settings
from serve.bodies.schema import ChatBody, CompletionBody
from serve.routes import page
from serve.routes.table import ROUTES
from tests.serve.conftest import STARTED, Running, start

ROOT = Path(__file__).parent.parent.parent
SHORT = {"prompt": "abc", "max_tokens": 2}


def trees(*packages: str, having: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Files of packages, parsed. having: words of which one must be in a file."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if re.search(rf"\b({having})\b", text):
                yield str(path), ast.parse(text)


def test_nothing_unpickles():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    words = "|".join([*banned, "allow_pickle", "eval", "exec", "__import__"])
    for path, tree in trees("serve", "mtp_jax", "kernels_pallas", having=words):
        kept = {"pickle"} if path.endswith("mtp_jax/decode/kept.py") else set()  # programs: docs/programs.md
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not (banned - kept) & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_only_the_http_port_listens(server: Running):
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                listening.add(int(fields[1].rpartition(":")[2], 16))
    assert server in STARTED
    assert listening == {int(s.url.rpartition(":")[2]) for s in STARTED if s.thread.is_alive()}


def test_code_of_a_checkpoint_is_not_imported(client, model):
    assert client.get("/health").status_code == 200
    assert "auto_map" in json.loads((model / "config.json").read_text())
    assert not (model / "imported").exists()


def test_clients_bring_no_templates(client):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    plain = client.post("/tokenize", json=body).json()
    answer = client.post("/tokenize", json={**body, "chat_template": "{{ 7 * 7 }}"})
    assert answer.json() == plain
    assert "chat_template" in answer.headers["warning"]
    for name, value in {"bos_token": "x", "messages": [], "chat_template": "{{ 7 * 7 }}", "self": 1}.items():
        answer = client.post("/tokenize", json={**body, "chat_template_kwargs": {name: value}})
        assert answer.status_code == 400
        assert f"{name}: the server sets this variable" in answer.json()["error"]["message"]


ODD_PATHS = [
    "//v1/models",
    "/V1/MODELS",
    "/v1/models/",
    "/v1%2fmodels",
    "/health/",
    "/%68ealth/x",
    "/health/../metrics",
    "/",
    "/x",
]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "ODD"])
def test_every_route_but_probes_needs_a_key(server: Running, method):
    locked = server.variant(api_keys=("secret", "other"))
    for path in [*(route.path for route in ROUTES), *ODD_PATHS]:
        for headers in (
            {},
            {"host": "localhost"},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
        ):
            answer = locked.request(method, path.replace("{name:path}", "tiny"), headers=headers)
            if path in ("/health", "/ping", "/ready", *page.PATHS) and method in ("GET", "HEAD"):
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401, (method, path, headers)
    for key in ("secret", "other"):
        assert locked.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_metrics_are_open_where_the_operator_says_so(server: Running):
    locked = server.variant(api_keys=("secret",), open_metrics=True)
    assert locked.get("/metrics").status_code == 200
    assert locked.request("POST", "/metrics").status_code == 401
    for path in ("/v1/models", "/load", "/metrics/", "/METRICS"):
        assert locked.get(path).status_code == 401
    assert server.variant(open_metrics=True, admin_key="a", api_keys=("b",)).get("/load").status_code == 401


def test_keys_are_compared_in_constant_time(server: Running, monkeypatch):
    compared: list[bytes] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    locked = server.variant(api_keys=("secret", "other"))
    for key in ("secret", "s", "nothing of the kind"):
        compared.clear()
        locked.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert compared == [b"secret", b"other"]


BAD = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    2**63,
    2**64,
    -(2**63) - 1,
    True,
    False,
    "",
    "x",
    "1",
    [],
    {},
    [[]],
    [None],
    [-1],
    ["a"] * 5000,
    {"a": {}},
    1e308,
    1.5,
]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_value_gets_past_the_schema_unchecked(kind, data):
    """Whatever a field holds, it is refused in words, or it is something the engine takes."""
    base: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), min_size=1, max_size=3))
    body = base | {name: data.draw(st.sampled_from(BAD)) for name in names}
    try:
        params = kind.model_validate(body).params(4, None, defaults={})
    except (ValidationError, RequestError):
        return
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
        assert math.isfinite(getattr(params, name))
    assert 1 <= params.n <= 128


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "n": 99999999999999999999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "a", "x": ' + b'{"y":' * 500 + b"1" + b"}" * 501,
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [true]}',
        b"[]",
        b"",
        b"\xff\xfe",
        b'{"prompt": "a"',
    ],
)
def test_broken_bodies_are_client_errors(client, content):
    answer = client.post("/v1/completions", content=content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def deep_schema(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep_schema(depth - 1)}} if depth else {"type": "string"}


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(" * 5000},
        {"regex": "(?=look)a"},
        {"choice": [""]},
        {"json": {"type": "no such type"}},
        {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
        {"json": "{"},
        {"json": {"enum": ["x" * 100] * 3000}},
        {"regex": "a{100000}"},
    ],
    ids=str,
)
def test_schemas_and_expressions_cannot_hurt(client, asked):
    answer = client.post("/v1/completions", json={**SHORT, "structured_outputs": asked})
    assert answer.status_code == 400, answer.text
    assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_numbers_and_choices_are_bounded_before_they_are_worked_with(monkeypatch):
    """The first and the last would take minutes."""
    lcm, bits = math.lcm, [0]
    monkeypatch.setattr(json_schema.math, "lcm", lambda a, b: bits.append((a * b).bit_length()) or lcm(a, b))
    monkeypatch.setattr(grammar, "_literal", None)
    coprime = [10**3000 + i for i in range(1, 2000, 2)]
    wrong: list[dict[str, Any]] = [
        {"json_schema": {"allOf": [{"multipleOf": n} for n in coprime]}},
        {"json_schema": {"allOf": [{"multipleOf": n} for n in coprime[:20]]}},
        {"json_schema": {"allOf": [{"multipleOf": float(f"1e-{n}")} for n in range(1, 300)]}},
        {"choice": ["!" * 2**20] * 8},
    ]
    for asked in wrong:
        with pytest.raises(RequestError, match=r"grammar of \d+ characters|least common multiple"):
            StructuredOutput(**asked)
    assert max(bits) < 128


def test_one_wrong_item_is_enough():
    """Millions of errors would be collected, of which one is told."""
    for body in ({"prompt": [["", ""], [""]]}, {"prompt": ["a", 1, 2]}, {"stop": [1, 2]}):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate({**SHORT, **body})
        assert caught.value.error_count() == 1
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [{}, {}]})
    assert len({error["loc"][1] for error in caught.value.errors()}) == 1


@pytest.mark.parametrize(
    "regex", ["((((a{1,500}){1,500}){1,500}){1,500})b", "(a*)*b", "(.*){50}", "a{10000}"]
)
def test_expensive_expressions_are_refused_or_bounded(client, regex):
    answer = client.post("/v1/completions", json={**SHORT, "structured_outputs": {"regex": regex}})
    assert answer.status_code in (200, 400), answer.text
    assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_bodies_are_bounded_whatever_their_length_header_says(server: Running, client):
    small = server.variant(max_body_bytes=100)
    large = json.dumps({**SHORT, "prompt": "a" * 100}).encode()
    assert small.post("/v1/completions", content=large).status_code == 413

    async def chunks():
        for i in range(0, len(large), 10):
            yield large[i : i + 10]

    assert small.post("/v1/completions", content=chunks()).status_code == 413
    assert small.post("/v1/completions", json=SHORT).status_code == 200
    packed = client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert packed.status_code == 415


def test_headers_are_bounded(server: Running, client):
    assert server.variant().get("/v1/models", headers={"x": "y" * 20_000}).status_code == 431
    try:
        status = client.get("/v1/models", headers={"x": "y" * 200_000}).status_code
    except httpx2.TransportError:  # it has answered and closed while we were still sending
        status = 400
    assert status in (400, 431)


def test_a_body_that_does_not_come_is_not_waited_for(server: Running):
    async def never():
        yield b'{"prompt": '
        await asyncio.sleep(60)

    answer = server.variant(body_seconds=0.05).post("/v1/completions", content=never())
    assert answer.status_code == 408


def test_headers_that_do_not_come_are_not_waited_for(fresh):
    with start(fresh, body_seconds=1.5) as running:
        host, _, port = running.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow")
            assert slow.recv(100) == b""
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            assert silent.recv(100) == b""
        with running.client() as client:
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("asked", [b"POST /v1/completions", b"POST /nowhere", b"GET /health"])
def test_a_body_that_nobody_reads_is_not_waited_for(fresh, asked):
    """A byte after the answer must not make the connection last for ever."""
    with start(fresh, body_seconds=1.5, max_body_bytes=100) as running:
        host, _, port = running.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(asked + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
            assert slow.recv(10_000).startswith(b"HTTP/1.1 ")
            slow.sendall(b"{")
            with slow.makefile("rb") as rest:
                rest.read()  # to the end


def test_answers_that_nobody_reads_are_not_waited_for(fresh):
    with start(fresh, body_seconds=1.5) as running:
        host, _, port = running.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = b"GET /web/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with pytest.raises(ConnectionError):
                deaf.sendall(ask * 2_000_000)
        with running.client() as client:
            assert client.get("/health").status_code == 200


def test_connections_are_bounded(server: Running):
    few = server.variant(max_connections=1)

    async def two() -> list[int]:
        transport = httpx2.ASGITransport(few._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = [client.post("/v1/completions", json=SHORT) for _ in range(2)]
            return [a.status_code for a in await asyncio.gather(*asked)]

    assert sorted(asyncio.run_coroutine_threadsafe(two(), server.loop).result(60)) == [200, 503]


def test_two_salts_never_share_a_prefix(client):
    def cached(salt: str) -> int:
        body = {"prompt": "q" * 100, "max_tokens": 1, "cache_salt": salt}
        answer = client.post("/v1/completions", json=body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") == cached("b") > 0


def test_the_server_opens_no_urls():
    clients = {"requests", "httpx", "httpx2", "aiohttp", "urllib3", "http", "ftplib"}
    for path, tree in trees("serve"):
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(n.split(".")[0] in clients or n == "urllib.request" for n in names), path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0"])
def test_other_hosts_are_not_answered_for(server: Running, host):
    assert server.variant().get("/v1/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_loopback_names_are(server: Running, host):
    assert server.variant().get("/v1/models", headers={"host": host}).status_code == 200
    named = server.variant(allowed_hosts=("Api.example",))
    assert named.get("/v1/models", headers={"host": host}).status_code == 403
    assert named.get("/v1/models", headers={"host": "api.example:443"}).status_code == 200


def test_errors_tell_nothing_of_the_inside(server: Running, monkeypatch, caplog):
    variant = server.variant()
    monkeypatch.setattr(mtp_jax.AsyncLLM, "in_queue", lambda self, prompt, function: 1 / 0)
    answer = variant.post("/tokenize", json={"prompt": "abc"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error; the server's log says more"
    assert "ZeroDivisionError" in caplog.text


def test_no_assertion_guards_anything():
    for path, tree in trees("serve"):
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path


def test_logs_are_one_printable_line_and_hold_no_prompts(server: Running, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "what nobody may read in a log"
    evil = b"id\x1b[31m\x00"
    answer = server.variant().post(
        "/v1/completions?a=%0A%1b", json={**SHORT, "prompt": secret}, headers={"x-request-id": evil}
    )
    assert answer.status_code == 200
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    named = server.variant().post("/v1/completions", json=SHORT, headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    lines = [r.getMessage() for r in caplog.records if r.name == "serve.access"]
    assert r"id\x1b[31m\x00" in lines[0]
    assert all(line.isprintable() for line in lines)
    assert secret not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_other_computers_need_a_key(host):
    with pytest.raises(ConfigError, match="--insecure-no-auth"):
        Settings("x", host=host)
    assert Settings("x", host=host, api_keys=("k",)).hosts == frozenset()
    assert not Settings("x", host=host, insecure_no_auth=True).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_computer_needs_none(host):
    assert Settings("x", host=host).is_loopback
