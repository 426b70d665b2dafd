"""One simulated model behind one server, on a real socket, for all tests of a process; and a real one."""

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer

from mtp_jax import LLM, AsyncLLM
from mtp_jax.api.local import local_runner
from mtp_jax.simulate.device import Simulated
from serve.base.settings import Settings
from serve.http.app import make_app
from serve.http.run import DrainingServer, listen
from serve.routes.route import Routes
from serve.routes.table import ROUTES
from tests import tiny_tokenizer
from tests.golden import model_dir
from tests.models import slowed

RIGGED = model_dir("rigged")
# Few buckets: every executable costs seconds.
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 252, "page_size": 16, "prefill_chunk": 16}
LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
RATES = (0.8, 0.6, 0.5)
# However slow the machine is, no stream has a ping in it but where a test is about pings.
NO_PINGS = {"ping_seconds": 1e6}
# The template of a model that thinks when told to, and is told of its tools by their names.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if thinking is defined and thinking %}<think>{% endif %}"
)


@dataclass
class Running:
    """A server in a thread of its own."""

    allm: AsyncLLM
    settings: Settings
    url: str
    loop: asyncio.AbstractEventLoop
    uvicorn: DrainingServer
    thread: threading.Thread

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=300, **options)

    def variant(self, routes: Routes = ROUTES, **settings: Any) -> "Variant":
        """Another application in front of the same engine."""
        return Variant(self, Settings(**{"model_names": "tiny", **NO_PINGS, **settings}), routes)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda: setattr(self.uvicorn, "should_exit", True))
        self.thread.join(60)
        assert not self.thread.is_alive()


# By the tests of this process, whether they still run or not.
STARTED: list[Running] = []


class Variant:
    """Requests to an application with other settings, without a socket, on the server's event loop."""

    def __init__(self, running: Running, settings: Settings, routes: Routes = ROUTES) -> None:
        self._loop = running.loop
        self._app: Any = make_app(running.allm, settings, routes=routes)

    def request(self, method: str, path: str, host: str = "127.0.0.1", **options: Any) -> httpx2.Response:
        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.request(method, path, **options)

        return asyncio.run_coroutine_threadsafe(send(), self._loop).result(300)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx2.Response:
        return self.request("POST", path, **options)


def start(llm: LLM, limits: dict[str, Any] | None = None, **settings: Any) -> Running:
    """A server of its own, which stops at the end of the context."""
    options = Settings("tiny", port=0, **{**NO_PINGS, **settings})
    listener = listen(options)
    allm = AsyncLLM(llm, **(limits or {}))
    loop, ready = asyncio.new_event_loop(), threading.Event()
    uvicorn = DrainingServer(allm, options, ready.set)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(uvicorn.serve([listener]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(600)
    STARTED.append(Running(allm, options, url_of(listener), loop, uvicorn, thread))
    return STARTED[-1]


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


@pytest.fixture(scope="package", autouse=True)
def _no_search_for_garbage() -> Iterator[None]:
    """Servers look for it when they start, which takes longer than the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for user in ("warm_up", "llm"):
            patch.setattr(f"mtp_jax.api.{user}.return_free_memory", lambda: None)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rigged golden checkpoint with a tokenizer of one token per character."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(RIGGED, folder)
    # A checkpoint may name code of its own; nothing here may ever import it.
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {name: f"modeling.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text(f"open({str(folder / 'imported')!r}, 'w')\n")
    return tiny_tokenizer.write(folder, 160, TEMPLATE)


def weightless(folder: Path, tags: Sequence[str] = ()) -> Path:
    """A model of the tests' sizes without weights; its tokenizer ends with ``tags``, a token each."""
    shutil.copy(RIGGED / "config.json", folder)
    tiny_tokenizer.write(folder, 160 - len(tags), TEMPLATE)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_tokens([AddedToken(tag, special=False) for tag in tags])
    tokens.save(str(folder / "tokenizer.json"))
    return folder


def simulated(model: Path, words: Sequence[str] = (), end_rate: float = 0.0, **options: Any) -> LLM:
    """An LLM of the tests' sizes without weights, whose text never ends by itself. words: its language's."""
    llm = LLM(model, **{"simulate": RATES, "simulated_step": 0.005, **SIZES, **options})
    runner = llm.engine.runner
    assert isinstance(runner, Simulated)
    runner.language = replace(runner.language, end_rate=end_rate)
    if words:
        tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
        runner.language = replace(runner.language, words=tuple(map(tokens.token_to_id, words)))
    return llm


@pytest.fixture(scope="session")
def compiled(model: Path) -> LLM:
    """A simulated LLM. Only the server may generate with it."""
    return simulated(model, return_routed_experts=True)


@pytest.fixture(scope="session")
def server(compiled: LLM) -> Iterator[Running]:
    """The server that most tests ask."""
    with start(compiled, spec_metrics="none") as running:
        yield running


def modelled(model: Path) -> LLM:
    """Compiles what serves anything, and no more behind the backs of tests."""
    llm = LLM(model, compile_cache=None, **SIZES)
    first, _ = llm.engine.warm_up_keys()
    llm.engine.warm_up_keys = lambda: (first, [])  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="session")
def real(model: Path) -> Iterator[Running]:
    """A server of the model itself, for what is about its numbers, weights and programs."""
    with start(modelled(model), spec_metrics="none") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[httpx2.Client]:
    """Asks the server over its socket."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def api(server: Running) -> Iterator[Any]:
    """The official client of OpenAI's."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def fresh(model: Path) -> LLM:
    """Another LLM of the same sizes, to compare with or to break."""
    return simulated(model)


@pytest.fixture
def fresh_model(model: Path, real: Running) -> LLM:
    """Another LLM of the model itself, with the programs of the real server."""
    other = modelled(model)
    local_runner(other.engine).programs = local_runner(real.allm.llm.engine).programs
    other.engine.prepare = lambda *given, **named: None  # type: ignore[method-assign]  # they serve anything
    return other


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LLM], threading.Event]]:
    """Makes an engine wait in every step until the event it returns is set."""
    gates: list[threading.Event] = []

    def gate(llm: LLM) -> threading.Event:
        step, opened = llm.engine.step, threading.Event()
        monkeypatch.setattr(llm.engine, "step", lambda: opened.wait(60) and step())
        gates.append(opened)
        return opened

    yield gate
    for opened in gates:
        opened.set()


@pytest.fixture
def slow_steps(server: Running) -> Iterator[None]:
    """Time to see an answer grow, and to stop it."""
    with slowed(server.allm.llm.engine, 0.05):
        yield


@pytest.fixture(autouse=True)
def idle_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test, nothing waits and every page is free or reusable."""
    running = [request.getfixturevalue(name) for name in {"server", "real"} & {*request.fixturenames}]
    yield
    for one in running:
        check_idle(one)


@pytest.fixture
def ask(server: Running) -> Iterator[Callable[..., Future[dict[str, Any]]]]:
    """Sends a request from a thread of its own."""
    with ThreadPoolExecutor(8) as pool, server.client() as client:

        def send(path: str = "/generate", method: str = "POST", **body: Any) -> Future[dict[str, Any]]:
            body = {"text": "abc", "sampling_params": LONG, **body} if path == "/generate" else body
            return pool.submit(lambda: client.request(method, path, json=body).raise_for_status().json())

        yield send


class Gate:
    """Stops an engine before a step: ``reached`` says that it stands there, ``opened`` lets it go on."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(60)

    def open(self) -> None:
        self.opened.set()


@pytest.fixture
def stop_after(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gate]:
    """Makes a gate behind a number of further steps."""

    def stop(steps: int) -> Gate:
        step, gate, left = server.allm.llm.engine.step, Gate(), iter(range(steps))

        def counted() -> Any:
            if next(left, None) is None:
                gate.reached.set()
                assert gate.opened.wait(60)
            return step()

        monkeypatch.setattr(server.allm.llm.engine, "step", counted)
        return gate

    return stop


def live(server: Running, count: int) -> None:
    """Wait until the engine has this many prompts."""
    wait_until(lambda: len(server.allm._submissions._by_prompt) == count)


def check_idle(running: Running) -> None:
    engine = running.allm.llm.engine
    wait_until(lambda: not engine.busy and running.allm.live == 0)
    assert engine.stats().pages_used == 0
    assert (running.allm.admission.requests, running.allm.admission.tokens) == (0, 0)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    ended = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        ended.wait(0.01)
    raise AssertionError("it did not come about")
