"""The command line over several hosts, and what clients of the server see when a rank is lost."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.commands import cli
from mtp_jax.hosts.options import Hosts
from tests import tiny_tokenizer
from tests.hosts.ranks import ranks
from tests.models import TINY, tiny_params

SIZES = "--max-num-seqs 2 --max-model-len 512 --page-size 64 --prefill-chunk 16 --num-speculative-tokens 1"
HOSTS = [
    "--mesh",
    "2x2",
    "--hosts",
    "HOSTS",
    "--rank",
    "RANK",
    "--coordinator",
    "COORDINATOR",
    "--no-compile-cache",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, TINY, tiny_params(), "float32")
    return str(tiny_tokenizer.write(Path(folder), TINY.vocab_size))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--coordinator here:9", "--coordinator without effect on one host; add --hosts 2 or more"),
        ("--rank 1", "ranks go from 0 to 0"),
        ("--secret-file SECRET", "--secret-file without effect on one host"),
        ("--hosts 2", "expected HOST:PORT of rank 0"),
        ("--hosts 2 --coordinator here:9", "needs a secret"),
        (
            "--hosts 2 --rank 1 --coordinator 127.0.0.1:1 --join-seconds 0.1 --secret-file SECRET",
            "does not listen",
        ),
    ],
)
def test_options_that_cannot_be(options, words, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("MTP_JAX_SECRET", raising=False)
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests")
    secret.chmod(0o600)
    given = options.replace("SECRET", str(secret)).split()
    for command in (["serve"], ["generate", "-p", "x"]):
        assert cli.main([*command, *given]) == 2
        assert words in capsys.readouterr().err


def test_files_of_certificates_need_hosts_or_a_server(capsys):
    for command, words in (
        (["generate", "-p", "x"], "--tls-cert without effect on one host"),
        (["serve"], "--tls-cert nowhere: No such file"),
    ):
        assert cli.main([*command, "--tls-cert", "nowhere"]) == 2
        assert words in capsys.readouterr().err
    for plain, host in ((True, "10.0.0.1"), (False, "127.0.0.1")):
        line = Hosts(2, coordinator=f"{host}:9").describe()
        assert ("NOT ENCRYPTED (--tls-cert)" in line) is plain
        assert line.endswith("JAX's own traffic is not encrypted")


def test_a_role_takes_the_secret_of_the_same_flag(capsys, monkeypatch, tmp_path):
    """Before weights are read."""
    monkeypatch.delenv("MTP_JAX_SECRET", raising=False)
    for given, words in (
        ([], "'prefill' needs a secret"),
        (["--secret-file", str(tmp_path / "x")], "cannot be read"),
    ):
        assert cli.main(["serve", "--role", "prefill", *given]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_generate(model):
    """Rank 0 prints, and both end with 0."""
    given = ["-m", "mtp_jax", "generate", model, "--token-ids", "5,9,11", "--max-tokens", "8", "--ignore-eos"]
    with ranks([*given, "--json", "--fixed-depth", *SIZES.split(), *HOSTS]) as found:
        assert [r.process.wait(600) for r in found] == [0, 0], found[0].text + found[1].text
        (line,) = [line for line in found[0].text.splitlines() if line.startswith("{")]
        assert "{" not in found[1].text
    assert len(json.loads(line)["outputs"][0]["token_ids"]) == 8


@pytest.mark.slow
def test_a_server_whose_follower_is_lost(model):
    """A stream that runs ends with an error event, a request that comes then gets 503, and rank 0 ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [
        "-m",
        "mtp_jax",
        "serve",
        model,
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
        "--fixed-depth",
    ]
    with ranks([*given, *SIZES.split(), *HOSTS]) as found:
        found[0].wait_for("ready in", 900)

        def post(**body: object) -> urllib.request.Request:
            sent = json.dumps({"model": "tiny", "prompt": [5, 9], "ignore_eos": True, **body}).encode()
            url = f"http://127.0.0.1:{port}/v1/completions"
            return urllib.request.Request(url, sent, {"Content-Type": "application/json"})

        with urllib.request.urlopen(post(max_tokens=8), timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        stream = urllib.request.urlopen(post(max_tokens=500, stream=True), timeout=120)
        assert stream.readline().startswith(b"data: ")
        refused: list[tuple[int, str | None]] = []

        def ask_again() -> None:
            end = time.monotonic() + 10
            while time.monotonic() < end and not refused:
                try:
                    urllib.request.urlopen(post(max_tokens=1), timeout=5).close()
                except urllib.error.HTTPError as error:
                    refused.append((error.code, error.headers["Retry-After"]))
                except OSError:
                    return

        asking = threading.Thread(target=ask_again)
        found[1].process.kill()
        asking.start()
        with stream:
            rest = stream.read().decode()
        asking.join(20)
        assert '"error"' in rest
        assert refused == [(503, "1")]
        assert found[0].process.wait(15) == 70, found[0].text
        assert "rank 0 of 2 ends: rank 1 is lost" in found[0].text
