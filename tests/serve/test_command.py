"""`mtp-jax serve`: options, what it says at the start, and (slow) a process of its own with its signals."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from mtp_jax import LLM, AsyncLLM, ConfigError, Reporter, SamplingParams, StructuredOutput
from mtp_jax.commands import cli
from mtp_jax.commands.serve import summary
from mtp_jax.text import chat_template, child
from serve.base.settings import Settings
from serve.http.run import listen
from serve.watch.stats_log import describe
from tests.serve.conftest import Running


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "--insecure-no-auth"),
        (["--port", "99999"], "expected an integer from 0 to 65535"),
        (["--api-key", "a b"], "API key"),
        (["--step-seconds", "0"], "--step-seconds 0"),
        (["--max-queued-tokens", "0"], "--max-queued-tokens 0; expected an integer of 1 or more"),
        (["--served-model-name", ""], "expected 1 to 256 characters each"),
        (["--prot"], "unrecognized arguments: --prot; do you mean --port?; see `mtp-jax serve --help`"),
        (["/no/such/model"], "not a directory"),
        (["deepseek-r1"], "Only `mtp-jax plan` knows models by name"),
        (["--draft-model", "/no/such/head"], "/no/such/head is not a directory"),
        (["--per-request-spec-decode-metrics", "all"], "--help"),
    ],
)
def test_wrong_options_are_one_line(capsys, options, says):
    assert cli.main(["serve", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_a_port_in_use_is_found_before_the_model_is_read(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "-q", "--port", str(port)]) == 2
    assert f"cannot bind to 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_port_of_a_server_that_still_starts_is_taken(capsys):
    """Neither ever listens, so it is for the bind to find out."""
    with listen(Settings("first", port=0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "-q", "--port", str(port)]) == 2
    assert f"cannot bind to 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_port_lost_while_the_engine_starts_is_one_line(model: Path, monkeypatch, capsys):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

        async def start(allm: AsyncLLM, reporter: Reporter | None = None) -> None:
            other.listen()

        monkeypatch.setattr(AsyncLLM, "start", start)
        assert cli.main(["serve", str(model), "-q", "--port", str(port), "--no-compile-cache"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot bind to 127.0.0.1 port {port}: Address already in use")
    assert error.count("\n") == 1


def test_what_keeps_the_engine_from_starting_is_one_line(model: Path, monkeypatch, capsys):
    async def start(allm: AsyncLLM, reporter: Reporter | None = None) -> None:
        raise ConfigError("no kernel for this")

    monkeypatch.setattr(AsyncLLM, "start", start)
    assert cli.main(["serve", str(model), "-q", "--port", "0", "--no-compile-cache"]) == 2
    assert capsys.readouterr().err == "error: no kernel for this\n"


def test_the_summary_names_what_is_served(server: Running, real: Running, model: Path, monkeypatch):
    assert summary(server.allm, server.settings, server.url).startswith(
        "model     tiny: SIMULATED, no weights"
    )
    server = real
    text = summary(server.allm, server.settings, server.url)
    assert text.startswith("model     tiny: 3 layers")
    assert "\ndrafts    1 NextN layer, depth 3\n" in text
    monkeypatch.setattr(server.allm.llm, "folders", (model, Path("tuned/head")))
    own = summary(server.allm, server.settings, server.url)
    assert "\ndrafts    1 NextN layer of tuned/head, depth 3\n" in own
    assert re.search(r"cache +room for [\d,]+ tokens: [\d.]+ requests of the longest, [\d,]+ tokens; ", text)
    assert re.search(
        r"\nsizes +[\d,]+ tokens of a request \(.*\), \d+ slots, chunks of \d+, .*pages of ", text
    )
    assert "256 requests wait" in text
    assert text.endswith(f"{server.url} once it is ready; no API key, this computer only")
    keyed = replace(server.settings, host="0.0.0.0", api_keys=("a", "b"))
    assert summary(server.allm, keyed, "http://0.0.0.0:1").endswith(
        "http://0.0.0.0:1 once it is ready; 2 API keys, NOT ENCRYPTED (--tls-cert, or a proxy)"
    )
    encrypted = replace(keyed, tls_cert="cert.pem")
    assert summary(server.allm, encrypted, "https://0.0.0.0:1").endswith("2 API keys")


def test_the_helpers_start_with_the_server(fresh: LLM, monkeypatch):
    """The first request with a schema, or with messages, starts none."""
    monkeypatch.setattr(chat_template, "_idle", [])
    assert fresh.engine.grammars
    trials = fresh.engine.grammars._trials
    assert trials._helper is None
    asyncio.run(AsyncLLM(fresh).start_helpers())
    assert trials._helper is not None
    assert len(chat_template._idle) == 1
    monkeypatch.setattr(child, "start", lambda *args: pytest.fail("started another"))
    chat = [{"role": "user", "content": "b"}]
    fresh.chat(chat, SamplingParams(structured=StructuredOutput(choice=["b"])))
    chat_template._end_idle()


def test_the_log_describes_an_interval(server: Running, client):
    before = server.allm.llm.engine.stats()
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 21}
    client.post("/v1/completions", json=body)
    line = describe(before, server.allm.llm.engine.stats(), 3.0)
    assert "0 running, 0 waiting; 7 tokens/s, 1 prompt tokens/s; cache 0% in use" in line
    assert float(line.rpartition("acceptance length ")[2].removesuffix(" where drafted")) > 1


@contextmanager
def process(model: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server process, and its address."""
    small = "--max-num-seqs 1 --max-model-len 252 --page-size 16 --prefill-chunk 16 --fixed-depth --port 0"
    command = [
        sys.executable,
        "-m",
        "mtp_jax.commands.cli",
        "serve",
        str(model),
        *small.split(),
        "--no-compile-cache",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stderr is not None
        try:
            for line in running.stderr:
                if found := re.match(r"ready in .*: (http\S+)/v1", line):
                    yield running, found[1]
                    break
        finally:
            running.kill()


@pytest.mark.slow
def test_a_signal_to_the_process_group_drains(model: Path):
    body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 240, "stream": True}
    with (
        process(model) as (running, url),
        httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        os.killpg(running.pid, signal.SIGTERM)
        rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
        assert running.wait(60) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(model: Path):
    body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 240, "n": 100, "stream": True}
    with (
        process(model) as (running, url),
        httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
    ):
        next(answer.iter_lines())
        running.send_signal(signal.SIGTERM)
        while httpx2.get(f"{url}/ready").status_code == 200:
            pass
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM


def test_wrong_folders_are_found_before_the_slow_import(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "serve.http.run", None)  # cannot be imported
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for argv, says in (
        ([str(tmp_path)], "model_type 'bert'"),
        (["--draft-model", "/nope"], "/nope is not a"),
    ):
        assert cli.main(["serve", *argv]) == 2
        assert says in capsys.readouterr().err
