"""Engines on a cluster of Ray that each test starts: replicas, a gang, a batch, and lost processes."""

import collections
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import tiny_tokenizer
from tests.cluster.on_ray.processes import command, of_ray, wait_for

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]' -c constraints.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]  # Ray's own

SIZES = "--max-model-len 96 --page-size 16 --prefill-chunk 16 --max-num-seqs 2 --num-speculative-tokens 1"
SIZES += f" --fixed-depth --compile-cache {jax.config.values['jax_compilation_cache_dir'] or 'xla'}"
START = 1200  # seconds: a cluster, and engines that compile


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_tokenizer.model(tmp_path_factory.mktemp("on_ray") / "tiny")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(port: int, prompt: str, **more: Any) -> Any:
    """An open response."""
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = json.dumps(fields | more).encode()
    return urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=300
    )


def text(port: int, prompt: str) -> str:
    with ask(port, prompt) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_two_replicas_of_which_one_is_killed(model, port, tmp_path):
    arguments = ["serve", str(model), *f"--ray --min-replicas 2 --port {port}".split(), *SIZES.split()]
    with command(arguments, tmp_path) as running:
        running.wait_for("ready in", START)

        def engines():
            return of_ray(running.process.pid, ":engine")

        assert len(engines()) == 2
        with ask(port, "def f", stream=True) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert len(stream.headers.get_all("x-request-id")) == 1
            assert stream.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(port, "", max_tokens=-1)
        assert refused.value.code == 400

        # Who has no token cannot join the cluster.
        code = "import ray; ray.init('auto', logging_level='ERROR'); print('joined')"
        environment = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")} | {
            "HOME": str(tmp_path)
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0
        assert "joined" not in done.stdout

        got, stop = collections.Counter[str](), threading.Event()

        def keep_asking(number: int) -> None:
            while not stop.is_set():
                try:
                    got[text(port, f"def f{number}")] += 1
                except Exception as error:
                    got[f"lost: {error!r}"] += 1

        clients = [threading.Thread(target=keep_asking, args=(i,)) for i in range(4)]
        for client in clients:
            client.start()
        wait_for(lambda: sum(got.values()) > 8, 300)
        victim = engines()[0]
        os.kill(victim, signal.SIGKILL)
        before = sum(got.values())
        wait_for(lambda: sum(got.values()) > before + 40, 300)
        stop.set()
        for client in clients:
            client.join(300)
        assert not [what for what in got if what.startswith("lost")]
        assert len(got) == 4  # each of its own text, whoever computed it
        wait_for(lambda: len(engines()) == 2 and victim not in engines(), 300)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == 0, running.text


def test_a_gang_of_which_one_is_killed_is_made_anew(model, port, tmp_path):
    arguments = ["serve", str(model), *f"--ray --hosts 2 --mesh 2x1 --port {port}".split(), *SIZES.split()]
    with command(arguments, tmp_path) as running:
        running.wait_for("ready in", START)
        before = text(port, "def f")
        (follower,) = of_ray(running.process.pid, "Follower")
        (leader,) = of_ray(running.process.pid, ":engine")
        os.kill(follower, signal.SIGKILL)
        began = time.monotonic()
        assert text(port, "def f") == before  # waits for the new gang
        assert time.monotonic() - began < START
        pids = {*of_ray(running.process.pid, "Follower"), *of_ray(running.process.pid, ":engine")}
        assert len(pids) == 2
        assert not pids & {follower, leader}


def test_a_batch_of_which_one_engine_is_killed(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def line(name: str, **body: Any) -> str:
        fields = {"prompt": f"def {name}", "max_tokens": 8, "temperature": 0} | body
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": fields})

    lines = [line(f"r{i}") for i in range(120)]
    source.write_text("\n".join([*lines, "{", line("bad", temperature=-1), line("\udcff", prompt="def f")]))
    arguments = ["batch", str(source), str(target), str(model), *SIZES.split()]
    with command([*arguments, "--ray", "--min-replicas", "2", "--in-flight", "8"], tmp_path) as running:
        wait_for(lambda: target.exists() and len(target.read_bytes().splitlines()) > 10, START)
        os.kill(of_ray(running.process.pid, "MapWorker")[0], signal.SIGKILL)
        assert running.process.wait(START) == 1, running.text
        assert "121 answered, 2 failed; " in running.text
    found = [json.loads(row) for row in target.read_text().splitlines()]
    assert len(found) == 123
    assert {row["custom_id"] for row in found} == {*(f"r{i}" for i in range(120)), "bad", "\udcff", None}
    with command(arguments, tmp_path) as running:  # which finds nothing left to do
        assert running.process.wait(120) == 1
        assert "123 done before (2 failed)" in running.text
