"""`mtp-jax bench burst` sees late refusals and lost answers; its client talks to a real socket."""

import asyncio
import json
import subprocess
import sys
import tempfile

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from mtp_jax.bench.burst import burst, faults
from mtp_jax.bench.client import connect
from mtp_jax.bench.own_server import OwnServer, own_server
from mtp_jax.bench.raw_client import Answer
from mtp_jax.errors import MtpJaxError
from tests.bench.test_serve import running

WHOLE = json.dumps({"usage": {"completion_tokens": 8}}).encode()
GOOD, REFUSED = Answer(3.0, 200, WHOLE), Answer(0.01, 503, b"{}")


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([GOOD, REFUSED], None),
        ([GOOD, REFUSED, Answer(0.2, 503, b"{}")], "1 refusals later than 100 ms, the last after 200 ms"),
        ([GOOD, REFUSED, Answer(0.1, 0, b"")], "answers lost (0), or of other statuses: [0]"),
        ([GOOD, REFUSED, Answer(0.1, 500, b"{}")], "[500]"),
        ([Answer(3.0, 200, WHOLE.replace(b"8", b"7")), REFUSED], "1 of 1 answers are not whole"),
        ([Answer(3.0, 200, WHOLE[:-3]), REFUSED], "1 of 1 answers are not whole"),
        ([Answer(3.0, 200, b"[]"), REFUSED], "1 of 1 answers are not whole"),
        ([GOOD], "1 requests accepted, 0 refused"),
        ([REFUSED], "0 requests accepted, 1 refused"),
    ],
)
def test_faults_of_a_burst(answers, fault):
    found = faults(answers, 8)
    assert len(found) == (fault is not None)
    assert all(fault in f for f in found)


def test_a_burst_comes_at_once_and_everybody_is_answered():
    bodies, busy, most = [], 0, 0

    async def complete(request):
        nonlocal busy, most
        bodies.append(await request.json())
        if busy == 4:
            return JSONResponse({"error": {}}, 503)
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.2)
        busy -= 1
        return JSONResponse(json.loads(WHOLE))

    with running(Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])) as url:
        host, port = url.removeprefix("http://").split(":")
        answers = asyncio.run(burst(host, int(port), {"prompt": "x", "max_tokens": 8}, 40))
    assert most == 4
    assert bodies == [{"prompt": "x", "max_tokens": 8}] * 40
    assert {a.status for a in answers} == {200, 503}
    assert [f for f in faults(answers, 8) if "later" not in f] == []


def test_a_server_that_refuses_its_metrics_is_not_waited_for():
    async def metrics(request):
        return JSONResponse({"error": {}}, 401)

    async def warm(server):
        async with connect(server.url, None) as http:
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
