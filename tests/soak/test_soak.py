"""The soak notices what must not happen; and a short one on a small model finds nothing."""

import asyncio
import io
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from mtp_jax.errors import MtpJaxError
from tests import tiny_tokenizer
from tests.soak import run as soak
from tests.soak.__main__ import main
from tests.soak.answers import Got, faults
from tests.soak.own_server import OwnServer, own_server
from tests.soak.requests import Asked, Kind, make, without_drafts


def asked(kind: Kind = "valid", **body) -> Asked:
    given = {"n": 1, "max_tokens": 4, "temperature": 0} | body
    return Asked(kind, "/v1/completions", json.dumps(given).encode(), None)


def got(status=200, ids=(1, 2), reason: str | None = "stop", text="", **more) -> Got:
    return Got(status, {0: list(ids)}, {0: text}, {0: reason} if reason else {}, **more)


INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
ARRAY = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}


def schema(**member) -> dict:
    closed = {"type": "object", "required": ["x"], "additionalProperties": False}
    return {"json": closed | {"properties": {"x": member}}}


@pytest.mark.parametrize(
    ("request_", "answer", "fault"),
    [
        (asked(), got(), None),
        (asked("aborted"), Got(None), None),
        (asked("invalid"), Got(400, refusal="no"), None),
        (asked(), Got(None), "lost"),
        (asked(), Got(None, error="ReadError: gone"), "ReadError: gone"),
        (asked("aborted"), Got(500, refusal="internal"), "valid, but status 500, 'internal'"),
        (asked("invalid"), got(), "invalid, but status 200"),
        (asked("invalid"), Got(500, refusal="internal"), "invalid, but status 500"),
        (asked(), got(reason=None), "0 of 1 completions"),
        (asked(n=2), got(), "1 of 2 completions"),
        (asked(), got(reason="error"), "finish reasons ['error']"),
        (asked(), got(ids=range(5)), "lengths [5]"),
        (asked(structured_outputs={"choice": ["a", "b"]}), got(text="c"), "'c' is not as"),
        (asked(structured_outputs={"choice": ["a", "b"]}), got(text="b"), None),
        (asked(structured_outputs={"regex": "(yes|no)( [0-9]{1,4})?"}), got(text="yes 12345"), "is not as"),
        (asked(structured_outputs={"regex": "(yes|no)( [0-9]{1,4})?"}), got(text="yes 1234"), None),
        (asked(structured_outputs=schema(type="boolean")), got(text='{"x": true'), "is not as"),
        (asked(structured_outputs=schema(type="boolean")), got(text='["x"]'), "is not as"),
        (asked(structured_outputs=schema(type="boolean")), got(text='{"x": 1}'), "is not as"),
        (asked(structured_outputs=schema(type="boolean")), got(text="{}"), "is not as"),
        (asked(structured_outputs=schema(type="boolean")), got(text='{"x": true, "y": 1}'), "is not as"),
        (asked(structured_outputs=schema(type="boolean")), got(text='{"x": true}'), None),
        (asked(structured_outputs=schema(enum=["red"])), got(text='{"x": "green"}'), "is not as"),
        (asked(structured_outputs=schema(enum=["red"])), got(text='{"x": "red"}'), None),
        (asked(structured_outputs=schema(**INTEGER)), got(text='{"x": 100}'), "is not as"),
        (asked(structured_outputs=schema(**INTEGER)), got(text='{"x": 99}'), None),
        (asked(structured_outputs=schema(**ARRAY)), got(text='{"x": [true, 1]}'), "is not as"),
        (asked(structured_outputs=schema(**ARRAY)), got(text='{"x": [true, false]}'), None),
    ],
)
def test_faults_of_an_answer(request_, answer, fault):
    found = faults(request_, answer)
    assert len(found) == (fault is not None)
    assert all(fault in f for f in found)


def test_requests_are_as_random_as_they_should_be():
    rng = random.Random(0)
    drawn = [make(rng, lambda n: "x" * n, "m", True) for _ in range(3000)]
    kinds = Counter(a.kind for a in drawn)
    assert 0.08 < kinds["invalid"] / 3000 < 0.12
    assert 0.18 < kinds["aborted"] / 3000 < 0.22
    valid = [a for a in drawn if a.kind == "valid"]
    options = Counter(name for a in valid for name in a.options)
    assert min(options.values()) > 100
    assert options.keys() >= {"structured_outputs", "logprobs", "stop", "seed", "speculative", "messages"}
    assert not any({"structured_outputs", "ignore_eos"} <= a.options.keys() for a in valid)
    plain = without_drafts(next(a for a in valid if a.options["stream"] and a.greedy))
    assert plain.options["speculative"] == {"enabled": False}
    assert plain.options["stream"] is False


def test_growth_is_between_the_second_quarter_and_the_last():
    assert soak.growth([0, 0, 5, 5, 6, 7, 9, 9]) == 4
    assert soak.growth([1, 2, 3]) == 0


def test_faults_are_counted_shown_and_the_status(monkeypatch, tmp_path, capsys):
    def run(*given):
        found = soak.Soak(faults=["tokens differ"], kinds=Counter(valid=3))
        return soak._report("demo", found, *given[1:])

    monkeypatch.setattr(soak, "run", run)
    assert main(["--json", str(tmp_path / "out.json")]) == 1
    assert "FAULT: tokens differ" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["figures"]["faults"] == ["tokens differ"]


def test_a_server_that_does_not_end_is_a_fault(monkeypatch):
    monkeypatch.setattr(soak, "_IDLE_SECONDS", 0.2)

    async def nothing(*given):
        return soak.Soak()

    @contextmanager
    def deaf(*given):
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
            assert process.stdout
            process.stdout.readline()
            yield OwnServer(process, "127.0.0.1", 1, io.BytesIO())

    monkeypatch.setattr(soak, "_soak", nothing)
    monkeypatch.setattr(soak, "own_server", deaf)
    found = soak.run("demo", 1, 1, 0, [])
    assert found.figures["faults"] == ["the server had not ended 0 s after SIGTERM"]


@contextmanager
def running(app):
    """Serve ``app`` on a free port; gives the base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_a_server_that_refuses_its_metrics_is_not_waited_for(monkeypatch):
    """It is asked directly, whatever proxies the environment names."""
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def metrics(request):
        return JSONResponse({"error": {}}, 401)

    async def warm(server):
        async with server.client() as http:
            await server.warm(http)

    with running(Starlette(routes=[Route("/metrics", metrics)])) as url, tempfile.TemporaryFile() as log:
        port = int(url.rpartition(":")[2])
        command = [sys.executable, "-c", "input()"]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE) as process,
            pytest.raises(MtpJaxError, match=r"does not show its metrics: .*401"),
        ):
            asyncio.run(warm(OwnServer(process, "127.0.0.1", port, log)))


def test_a_key_in_the_environment_does_not_lock_a_benchmark_out(monkeypatch):
    started = {}

    class Started:
        def __init__(self, command, **options):
            started.update(options)

        def kill(self):
            started["killed"] = True

        def wait(self):
            return 0

    monkeypatch.setenv("MTP_JAX_API_KEY", "sesame")
    monkeypatch.setattr(subprocess, "Popen", Started)
    with own_server("demo", []):
        assert "MTP_JAX_API_KEY" not in started["env"]
        assert started["env"]["JAX_LOG_COMPILES"] == "1"
    assert started["killed"]


def test_a_server_that_has_ended_is_told_with_its_log():
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
        with subprocess.Popen(command, stderr=log) as process:
            server = OwnServer(process, "127.0.0.1", 1, log)
            process.wait(60)
            with pytest.raises(MtpJaxError, match="ended with status 1; its log ends with\nno such model"):
                server.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_without_faults(tmp_path):
    model = tiny_tokenizer.model(tmp_path / "rigged")
    sizes = "--max-model-len 512 --page-size 16 --prefill-chunk 64 --max-num-seqs 4 --num-pages 40"
    out = tmp_path / "out.json"
    command = ["--model", str(model), "--minutes", "0.5", "--rate", "5", "--json", str(out)]
    assert main([*command, "--serve-options", sizes]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert min(figures["requests"].values()) > 5
    assert figures["rechecked"] >= 5
    assert figures["preemptions"] > 0
