"""The access log says how much was generated, why it ended, and why a request was refused."""

import json
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax import SamplingParams, Speculation
from serve.watch.access_log import LOGGER, JsonLines, Record, log_connection, log_request, record_of, set_up
from tests.serve.conftest import Running, wait_until

SHORT = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 4}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The messages so far."""
    caplog.set_level(logging.INFO, LOGGER.name)
    return lambda: [r.getMessage() for r in caplog.records if r.name == LOGGER.name]


@pytest.fixture
def untouched() -> Any:
    """The loggers as they were, afterwards."""
    level, handlers, propagate = LOGGER.level, list(LOGGER.handlers), LOGGER.propagate
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate


@pytest.mark.parametrize(("kind", "drafted"), [("delta", 6), ("cumulative", 3), ("final_only", 3)])
def test_drafts_are_counted_once(kind, drafted):
    """A stream of /generate has everything so far in each output, one of other routes its new part."""
    record = Record(asked=SamplingParams(output_kind=kind))
    one: Any = SimpleNamespace(
        prompt_token_ids=[1], outputs=[], cached_tokens=0, timing=None, speculation=Speculation([1], [3])
    )
    record.saw(0, one)
    record.saw(0, one)
    assert (record.prompts[0].drafted, record.prompts[0].accepted) == (drafted, drafted // 3)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_finish_reasons(server: Running, lines, stream):
    body = {**SHORT, "prompt": ["abc", "abcde"], "stream": stream}
    assert server.variant().post("/v1/completions", json=body).status_code == 200
    assert lines()[0].endswith(" s, 8 prompt tokens, 8 completion tokens, length")


def test_the_place_in_a_trace(server: Running, lines):
    place = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    variant = server.variant()
    for given in (place, place.upper(), place + "\x1b[2J", "x" * 10_000):
        assert variant.post("/v1/completions", json=SHORT, headers={"traceparent": given}).status_code == 200
    told, *untold = lines()
    assert told.endswith(f", length, trace {place}")
    assert len(untold) == 3
    assert not [line for line in untold if "trace" in line]


def test_the_reason_of_a_refusal(server: Running, lines):
    variant = server.variant(api_keys=("k",))
    assert variant.post("/v1/completions", json=SHORT).status_code == 401
    key = {"Authorization": "Bearer k"}
    variant.post("/v1/completions", json={**SHORT, "temperature": 9}, headers=key)
    variant.get("/nothing", headers=key)
    refused, wrong, unknown = lines()
    assert refused.endswith(" s: a valid API key is needed: Authorization: Bearer KEY")
    assert "temperature: " in wrong
    assert "9" in wrong
    assert " 404 " in unknown
    assert "there is no /nothing here" in unknown


def test_probes_that_succeed_leave_no_line(server: Running, lines, caplog):
    variant = server.variant()
    for path in ("/health", "/ping", "/metrics", "/ready", "/server_info", "/", "/web/style.css"):
        assert variant.get(path).status_code == 200
    variant.post("/health")  # which is none
    (line,) = lines()
    assert "POST /health 405" in line
    caplog.set_level(logging.DEBUG, LOGGER.name)
    variant.get("/health")
    assert "GET /health 200" in lines()[-1]


def test_quotes_stay_as_they_are(server: Running, lines):
    server.variant().post("/v1/completions", json={"prompt": "a", "n": "x"})
    assert lines()[0].endswith('n: Input should be a valid integer; got "x"')


def test_a_client_with_tls_is_named(server: Running, lines):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(bytes.fromhex("160301020001"))
        assert client.recv(1) == b""
    wait_until(lambda: any("speaks TLS" in line for line in lines()))


def test_json_lines(untouched):
    shown: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(json.loads(JsonLines().format(record)))  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    scope: dict[str, Any] = {"method": "POST", "path": "/a\n\x1b"}
    record = record_of(scope)
    assert record_of(scope) is record
    record.error = "no\nmore"
    done = SimpleNamespace(num_tokens=3, finish_reason="stop")
    more = {"speculation": Speculation(), "cached_tokens": 0, "timing": None}
    output: Any = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[done, done], **more)
    record.saw(0, output)
    record.saw(0, output)  # the newest counts
    log_request(scope, b"name", 500, 0.25)
    log_connection("nothing of HTTP")
    first, second = shown
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "id": "name",
        "method": "POST",
        "path": r"/a\n\x1b",
        "status": 500,
        "seconds": 0.25,
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "finish_reasons": ["stop"],
        "error": r"no\nmore",
    }
    assert second["error"] == "nothing of HTTP"
    assert Record().fields() == {}


@pytest.mark.parametrize(
    ("quiet", "mode", "out", "err"),
    [
        (False, "json", True, False),
        (True, "json", True, False),
        (True, "text", False, True),
        (False, "off", False, False),
    ],
)
def test_where_lines_go(capsys, untouched, monkeypatch, quiet, mode, out, err):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    set_up(quiet, mode)
    log_connection("nothing of HTTP")
    shown = capsys.readouterr()
    assert ("nothing of HTTP" in shown.out, "nothing of HTTP" in shown.err) == (out, err)
