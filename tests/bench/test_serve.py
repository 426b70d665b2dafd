"""`mtp-jax bench serve` against a server whose answers are known."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from mtp_jax.bench import client
from mtp_jax.bench.client import Answer, Speculated
from mtp_jax.bench.latency import Timeline
from mtp_jax.commands import cli


class Fake:
    """Answers every prompt with two chunks of three tokens each; counts what it is asked."""

    def __init__(self):
        self.bodies, self.busy, self.most, self.flushes, self.broken, self.slow = [], 0, 0, 0, False, False

    def app(self):
        routes = [
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/flush_cache", self.flush, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def models(self, request):
        return JSONResponse({"data": [{"id": "fake"}]})

    async def flush(self, request):
        self.flushes += 1
        return PlainTextResponse("")

    async def metrics(self, request):
        n = sum("speculative" not in b for b in self.bodies)
        lines = []
        for engine in ("0", "1"):  # data parallelism
            labels = f'engine="{engine}",model_name="fake"'
            lines.append(f"vllm:spec_decode_num_drafts_total{{{labels}}} {1.0 * n}")
            for position, accepted in (("0", 1.0 * n), ("1", 0.5 * n)):
                at = f'{{{labels},position="{position}"}}'
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{at} {accepted}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.broken:
            return JSONResponse({"error": {"message": "no"}}, 503)

        async def events():
            self.busy += 1
            self.most = max(self.most, self.busy)
            for _ in range(2):
                await asyncio.sleep(0.05 if self.slow and "speculative" in body else 0.01)
                choice = {"delta": {"content": "abc"}} if "messages" in body else {"text": "abc"}
                yield f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 6}})}\n\n"
            yield "data: [DONE]\n\n"
            self.busy -= 1

        return StreamingResponse(events(), media_type="text/event-stream")


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


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def bench(fake, tmp_path):
    """Runs the command against the fake server; gives (status, JSON if it was written)."""

    def run(*given):
        out = tmp_path / "out.json"
        with running(fake.app()) as url:
            command = ["bench", "serve", "--base-url", url, "--json", str(out), "--prompt-characters", "40"]
            status = cli.main([*command, *given])
        return status, json.loads(out.read_text()) if out.exists() else None

    return run


def test_closed_loop_with_and_without_speculation(fake, bench, tmp_path):
    status, found = bench("--concurrency", "2", "--requests", "6", "--rounds", "2", "--compare")
    assert status == 0
    off, server = found["figures"]["levels"]
    assert (off["mode"], server["mode"], server["concurrency"]) == ("off", "server", 2)
    assert fake.most == 2
    assert fake.flushes > 2 * 3
    assert sum(b.get("speculative") == {"enabled": False} for b in fake.bodies) == len(fake.bodies) / 2 == 18
    assert all(b["stream_options"] == {"include_usage": True} and b["ignore_eos"] for b in fake.bodies)
    assert {len(b["prompt"]) for b in fake.bodies} == {40}
    assert (server["acceptance_length"], server["acceptance_per_position"]) == (2.5, [1.0, 0.5])
    assert (off["acceptance_length"], off["acceptance_per_position"]) == (None, [])
    for level in (off, server):
        assert level["errors"] == {}
        for summary in level["rounds"]:
            assert (summary["requests"], summary["tokens"], summary["itl"]["count"]) == (6, 36, 6)
            assert 0.01 <= summary["ttft"]["p50"] < summary["e2e"]["p50"]
            assert summary["tpot"]["p50"] == pytest.approx(summary["itl"]["p50"] / 5, rel=0.5)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_key_is_neither_shown_nor_kept(bench, capsys):
    for given in (["--api-key", "sesame"], ["--api-key=sesame"]):
        _, found = bench("--concurrency", "1", "--requests", "2", "--rounds", "1", *given)
        assert "sesame" not in json.dumps(found) + "".join(capsys.readouterr())
        assert "--api-key" in found["command"]


def test_at_a_rate_the_faster_answers_count(fake, bench):
    fake.slow = True
    _, found = bench("--rate", "100", "--requests", "4", "--rounds", "1", "--compare")
    off, server = found["figures"]["levels"]
    assert (off["mode"], off["speedup"]["median"]) == ("off", 1)
    a, b = (level["rounds"][0]["e2e"]["p50"] for level in (off, server))
    assert server["speedup"]["median"] == pytest.approx(a / b)
    assert server["speedup"]["median"] > 1.5  # without drafts the fake answers in five times the time


def test_poisson_arrivals_to_the_chat_route(fake, bench):
    status, found = bench("--rate", "200", "--requests", "8", "--rounds", "1", "--chat", "--model", "mine")
    assert status == 0
    [level] = found["figures"]["levels"]
    assert level["rate"] == 200
    assert level["rounds"][0]["tokens"] == 48
    assert {b["model"] for b in fake.bodies} == {"mine"}
    assert all(b["messages"][0]["role"] == "user" for b in fake.bodies)


def test_a_server_that_refuses_everything(fake, bench, capsys):
    fake.broken = True
    status, found = bench("--concurrency", "1", "--requests", "2")
    assert (status, found) == (2, None)
    assert 'error: no request was answered: 503: {"error":{"message":"no"}}' in capsys.readouterr().err


def test_refusals(capsys):
    for given, message in (
        (["--concurrency", "1", "--rate", "1"], "give either --concurrency or --rate"),
        (["--rate", "0"], "must be above 0"),
        (["--concurrency", "1,8", "--requests", "7"], "--requests 7 is fewer than the 8 at a time"),
        (["--base-url", "http://127.0.0.1:9", "--rate", "1"], "does not answer as it should"),
        (["--base-url", "http://a:b", "--rate", "1"], "'http://a:b' is no URL"),
    ):
        assert cli.main(["bench", "serve", *given]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [({"message": "no"}, "no"), ("no", "no"), ({"code": 1}, "{'code': 1}"), (["no"], "['no']"), (None, None)],
)
def test_errors_in_a_stream_are_told_in_every_form(error, told):
    answer = Answer(Timeline(0.0))
    client._read(answer, {"error": error, "choices": None})
    assert answer.error == told


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content"])
def test_thoughts_are_output_under_any_name(name):
    answer = Answer(Timeline(0.0))
    client._read(answer, {"choices": [{"delta": {"role": "assistant", "content": None, name: "hm"}}]})
    client._read(answer, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert answer.text == ["hm"]


def test_a_server_on_this_computer_is_asked_without_a_proxy(fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    async def named(url):
        async with client.connect(url, None) as http:
            return await client.model_name(http)

    with running(fake.app()) as url:
        assert asyncio.run(named(url)) == "fake"


def test_arrivals_are_independent_of_answers():
    async def run():
        starts = []

        async def ask(prompt):
            starts.append(time.perf_counter())
            await asyncio.sleep(0.5)
            return Answer(Timeline(0.0))

        answers = await client.poisson(ask, ["x"] * 20, rate=200)
        return answers, starts

    answers, starts = asyncio.run(run())
    assert len(answers) == 20
    assert starts[-1] - starts[0] < 0.5  # none waited for another


def test_counters_are_differences():
    assert Speculated(10, (7, 3)).since(Speculated(4, (3,))) == Speculated(6, (4, 3))
