"""What a server promises under bursts, disconnects, deadlines, signals, stuck and broken engines.

That pages return after every kind of end is checked after every test (``idle_at_the_end``).
"""

import asyncio
import json
import logging
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from mtp_jax import ConfigError, SamplingParams
from mtp_jax.api.admission import Admission
from mtp_jax.api.completions import CompletionState
from mtp_jax.api.outputs import CompletionOutput, RequestOutput, Timing
from mtp_jax.engine.speculation import Speculation
from serve.answers.generation import check
from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.watch.watchdog import STUCK_STATUS, Watchdog
from tests.serve.conftest import Running, start, wait_until

GREEDY = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 24}
LONG = {**GREEDY, "max_tokens": 240}


def many(server: Running, bodies: list[dict[str, Any]]) -> list[httpx2.Response]:
    """All at once."""
    variant = server.variant()

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(variant._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))

    return asyncio.run_coroutine_threadsafe(ask(), server.loop).result(120)


def test_a_burst_is_refused_or_answered(server, client, monkeypatch):
    monkeypatch.setattr(server.allm._submissions, "admission", Admission(4, 10**6))
    expected = client.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]
    answers = many(server, [GREEDY] * 200)
    refused = [a for a in answers if a.status_code == 503]
    accepted = [a for a in answers if a.status_code == 200]
    assert len(refused) + len(accepted) == 200
    assert len(accepted) >= 4
    assert refused
    assert {a.json()["choices"][0]["text"] for a in accepted} == {expected}
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "overloaded"


def test_prompt_tokens_are_bounded(server, monkeypatch):
    monkeypatch.setattr(server.allm._submissions, "admission", Admission(100, 300))
    answers = many(server, [{**GREEDY, "prompt": [5 + i] * 200} for i in range(8)])
    assert {a.status_code for a in answers} == {200, 503}


def test_the_n_of_a_prompt_counts(server, client, monkeypatch):
    monkeypatch.setattr(server.allm._submissions, "admission", Admission(4, 10**6))
    assert client.post("/v1/completions", json={**GREEDY, "n": 4}).status_code == 200
    assert client.post("/v1/completions", json={**GREEDY, "n": 5}).status_code == 400


def test_more_prompts_than_ever_fit_are_a_client_error(server, client, monkeypatch):
    """503 would have clients try again for ever."""
    monkeypatch.setattr(server.allm._submissions, "admission", Admission(4, 10**6))
    answer = client.post("/v1/completions", json={**GREEDY, "prompt": ["a", "b", "c"], "n": 2})
    assert answer.status_code == 400
    assert "3 prompts of n = 2, 6 requests in all; the queue takes 4" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={**GREEDY, "prompt": ["a", "b"], "n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_not_served(server: Running, compiled, gated, stream):
    """Before its first step, running or in the queue."""
    opened = gated(compiled)
    before = compiled.engine.stats().finished.get("abort", 0)
    with server.client() as other:
        requests = [
            other.build_request("POST", "/v1/completions", json={**LONG, "stream": stream}) for _ in range(6)
        ]

        async def leave() -> None:
            async with httpx2.AsyncClient(base_url=server.url) as client:
                asked = [
                    asyncio.create_task(client.post("/v1/completions", content=r.content)) for r in requests
                ]
                while server.allm.live < 6:
                    await asyncio.sleep(0.01)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

        asyncio.run(leave())
    opened.set()
    wait_until(lambda: server.allm.live == 0)
    assert compiled.engine.stats().finished["abort"] == before + 6


def test_a_client_that_leaves_in_the_middle(server: Running, compiled, slow_steps):
    before = compiled.engine.stats().finished.get("abort", 0)
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        assert next(answer.iter_lines()).startswith("data: ")
    wait_until(lambda: server.allm.live == 0)
    assert compiled.engine.stats().finished["abort"] == before + 1


def test_a_client_that_leaves_before_its_body_has_arrived(server: Running, client, caplog):
    """Half a body is neither an error of the server nor worth a traceback."""
    caplog.set_level(logging.INFO)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(head)
    wait_until(lambda: any("POST /v1/completions 499" in r.getMessage() for r in caplog.records))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert client.get("/health").status_code == 200


def test_a_deadline_ends_a_request(client):
    answer = client.post("/v1/completions", json={**GREEDY, "timeout": 1e-6})
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"
    assert answer.headers["x-should-retry"] == "false"  # as OpenAI's clients would


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_keeps_the_completions_that_have_text(client, compiled, stream):
    """Of three completions two have slots."""
    engine, before = compiled.engine, compiled.engine.stats().generation_tokens
    step = engine.step

    def step_until_late():
        if engine.stats().generation_tokens > before + 8:
            for request in engine.scheduler.live():
                object.__setattr__(request, "deadline", 0.0)
        return step()

    engine.step = step_until_late
    try:
        answer = client.post("/v1/completions", json={**LONG, "n": 3, "timeout": 1e4, "stream": stream})
    finally:
        del engine.step
    assert answer.status_code == 200
    texts, ends = ["", "", ""], ["", "", ""]
    if stream:
        *events, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    else:
        chunks = [answer.json()]
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert ends == ["timeout"] * 3
    assert texts[0]
    assert texts[1]
    assert not texts[2]


@pytest.mark.parametrize("reason", ["timeout", "abort"])
def test_an_end_without_new_tokens_is_no_error(reason):
    """The last delta of a stream that its deadline ends has none."""

    def end(tokens: int, reason: str | None = reason) -> RequestOutput:
        c = CompletionOutput(0, "", [], tokens, reason, None, [], [], Speculation(), None)
        return RequestOutput("", [1], [c], None, Timing(0.1, 0.2, 0.3), 0, None)

    check([end(5)], 1, ending=True)
    check([end(0), end(5)], 2, ending=True)
    check([end(0), end(0, None)], 2, ending=True)
    check([end(0)], 2, ending=True)
    with pytest.raises(ApiError):
        check([end(0)], 1, ending=True)
    check([end(0, "abort")], 1, ending=False)  # a client has ended it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_scored_prompts_outlive_one_that_ends_early(client, compiled, monkeypatch, stream, max_tokens):
    """Of a prompt whose time was over before its prefill, tokens are told without log-probabilities."""
    make, times = compiled.engine.make_requests, iter([1e-6, None])
    monkeypatch.setattr(
        compiled.engine, "make_requests", lambda *a, **o: make(*a, **{**o, "timeout": next(times)})
    )
    body = {**GREEDY, "prompt": ["abc", "defgh"], "echo": True, "logprobs": 0, "max_tokens": max_tokens}
    response = client.post("/v1/completions", json={**body, "stream": stream})
    assert response.status_code == 200
    lines = response.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    answers = [json.loads(line.removeprefix("data: ")) for line in lines]
    found: dict[int, list[float | None]] = {0: [], 1: []}
    ends = {}
    for choice in (c for answer in answers for c in answer["choices"]):
        found[choice["index"]] += choice["logprobs"]["token_logprobs"]
        ends[choice["index"]] = choice["finish_reason"]
    assert found[0] == [None] * 3
    assert [p is None for p in found[1]] == [True] + [False] * (4 + max_tokens)
    assert ends == {0: "timeout", 1: "length"}


def test_the_server_has_a_deadline_of_its_own(server):
    impatient = server.variant(request_seconds=1e-6)
    assert impatient.post("/v1/completions", json=GREEDY).status_code == 408
    assert impatient.post("/v1/completions", json={**GREEDY, "timeout": 60}).status_code == 408


def test_sigterm_drains(fresh, client, gated):
    """Not ready any more and nothing new is taken, but what runs comes to its end."""
    expected = client.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]
    running = start(fresh)
    opened = gated(fresh)

    async def drain() -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=running.url, timeout=300) as asking:
            answer = asyncio.create_task(asking.post("/v1/completions", json=GREEDY))
            while running.allm.live < 1:
                await asyncio.sleep(0.01)
            running.uvicorn.handle_exit(signal.SIGTERM, None)
            while (ready := await asking.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            unready = ready.json()
            assert (unready["status"], unready["reason"]) == ("unready", "shutting down")
            assert (await asking.get("/health")).status_code == 200
            refused = await asking.post("/v1/completions", json=GREEDY)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.headers["connection"] == "close"  # asked again elsewhere
            opened.set()
            return await answer

    answer = asyncio.run(drain())
    assert answer.json()["choices"][0]["text"] == expected
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert running.allm.error is None


def test_what_outlasts_the_drain_is_aborted(fresh, gated):
    running = start(fresh, drain_seconds=0.2)
    opened = gated(fresh)

    async def drain() -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=running.url, timeout=300) as asking:
            answer = asyncio.create_task(asking.post("/v1/completions", json=GREEDY))
            while running.allm.live < 1:
                await asyncio.sleep(0.01)
            running.uvicorn.handle_exit(signal.SIGTERM, None)
            while not running.allm.draining:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            opened.set()
            return await answer

    answer = asyncio.run(drain())
    assert answer.status_code == 503 or answer.json()["choices"][0]["finish_reason"] == "abort"
    running.thread.join(60)
    assert not running.thread.is_alive()


def test_a_stuck_engine_is_not_ready(server: Running, compiled, gated, client):
    impatient = server.variant(ready_seconds=2)  # longer than a program takes that is rehearsed meanwhile
    assert impatient.get("/ready").status_code == 200
    opened = gated(compiled)

    async def ask() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=300) as asking:
            answer = asyncio.create_task(asking.post("/v1/completions", json=GREEDY))
            while (ready := await asyncio.to_thread(impatient.get, "/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            assert "in one step" in ready.json()["reason"]
            assert (await asking.get("/health")).status_code == 200
            opened.set()
            assert (await answer).status_code == 200

    asyncio.run(ask())
    assert impatient.get("/ready").status_code == 200


def test_the_watchdog_ends_a_stuck_process(server: Running, compiled, gated, caplog, capfd):
    opened = gated(compiled)
    ended: list[int] = []

    async def ask() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=300) as asking:
            answer = asyncio.create_task(asking.post("/v1/completions", json={**GREEDY, "prompt": "secret"}))
            while not ended:
                await asyncio.sleep(0.01)
            opened.set()
            assert (await answer).status_code == 200

    with Watchdog(server.allm, 0.1, ended.append):
        asyncio.run(ask())
    assert ended == [STUCK_STATUS]
    assert "the engine is in one step" in caplog.text
    assert "secret" not in caplog.text
    assert "in wait" in capfd.readouterr().err  # the stacks


def test_a_server_watches_its_steps(fresh, gated, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr("serve.http.run.Watchdog", lambda allm, limit: Watchdog(allm, limit, ended.append))
    with start(fresh, step_seconds=3) as running:
        with running.client() as client:
            assert client.post("/v1/completions", json=GREEDY).status_code == 200
            assert not ended
            opened = gated(fresh)
            threading.Timer(60, opened.set).start()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.post, "/v1/completions", json=GREEDY)
                wait_until(lambda: bool(ended))
                opened.set()
                assert answer.result().status_code == 200
        assert ended == [STUCK_STATUS]


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_engine_answers_everybody_and_ends_the_server(fresh, stream):
    running, began = start(fresh), threading.Event()
    step, steps = fresh.engine.step, []

    def break_down():
        steps.append(fresh.engine.busy)
        if sum(steps) < 12:  # enough for some text, and far from the end
            return step()
        assert not stream or began.wait(60)
        return 1 / 0

    fresh.engine.step = break_down  # type: ignore[method-assign]
    text, body = "", {**LONG, "stream": stream}
    with running.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for part in answer.iter_text():
            text += part
            began.set()
    if stream:
        *_, error, done = text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert (
            json.loads(error.removeprefix("data: "))["error"]["message"]
            == "the engine failed: ZeroDivisionError"
        )
    else:
        assert answer.status_code == 503
        assert json.loads(text)["error"]["code"] == "unavailable"
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert isinstance(running.allm.error, ZeroDivisionError)


def test_numbers_that_are_not_finite_end_one_request(server, client, monkeypatch):
    """The engine says so with a finish reason; here the first text is made to end with it."""
    expected = client.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]
    advance, chosen = CompletionState.advance, []

    def fail(completion: CompletionState, engine: Any) -> None:
        if completion.request.params.max_tokens == 23:
            chosen.append(completion)
            raise FloatingPointError
        advance(completion, engine)

    monkeypatch.setattr(CompletionState, "advance", fail)
    bad, good = many(server, [{**GREEDY, "max_tokens": 23}, GREEDY])
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "generation_failed")
    assert good.json()["choices"][0]["text"] == expected
    stream = client.post("/v1/completions", json={**GREEDY, "max_tokens": 23, "stream": True})
    assert '"code":"generation_failed"' in stream.text


def test_nothing_is_compiled_for_a_request(server, client, compiled, monkeypatch):
    """Only warm-up compiles; it may still be at it, in a thread of its own."""
    compile_, by = compiled.engine.runner.compile, []

    def record(*args: Any, **kwargs: Any) -> None:
        by.append(threading.current_thread().name)
        compile_(*args, **kwargs)

    monkeypatch.setattr(compiled.engine.runner, "compile", record)
    bodies: list[dict[str, Any]] = [
        GREEDY,
        {**GREEDY, "temperature": 1, "n": 4, "logprobs": 5},
        {**LONG, "prompt": "a" * 200, "echo": True, "logprobs": 1, "max_tokens": 9},
        {**GREEDY, "ignore_eos": False, "structured_outputs": {"regex": "a+b"}},
        {**GREEDY, "speculative": {"enabled": False}},
    ]
    assert {a.status_code for a in many(server, bodies)} == {200}
    assert set(by) <= {"warm-up"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"port": 70_000}, "port = 70000; expected an integer from 0 to 65535"),
        ({"drain_seconds": 0}, "drain_seconds = 0"),
        ({"max_body_bytes": 0}, "max_body_bytes = 0"),
        ({"spec_metrics": "all"}, "expected one of"),
        ({"api_keys": ("a b",)}, "API key"),
        ({"api_keys": ("",)}, "API key"),
    ],
)
def test_wrong_settings_say_what_is_allowed(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Settings("x", **wrong)


def test_prompts_are_served_as_through_python(fresh, server):
    """Mixed requests through HTTP at once, each equal to its own run alone."""
    prompts = ["abc", "defg", "hello world", "x" * 60]
    expected = [
        fresh.generate(p, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0] for p in prompts
    ]
    answers = many(server, [{**GREEDY, "prompt": p} for p in prompts * 2])
    assert [a.json()["choices"][0]["text"] for a in answers] == [e.outputs[0].text for e in expected] * 2
