"""A server of random weights, of a config.json alone: every route answers, and every answer is marked."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from mtp_jax import LLM, ConfigError
from mtp_jax.commands import cli
from tests.serve.conftest import RIGGED, SIZES, Running, start

LENGTH = 2.5
CHAT = [{"role": "user", "content": "hello"}]
# By the paths of all routes that generate.
ASKED = {
    "/v1/completions": {"prompt": "def f", "max_tokens": 8},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "max_tokens": 8, "messages": CHAT},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 8}},
}


def without_weights(folder: Path) -> Path:
    """A folder with config.json alone: a layer, a NextN layer, and a token for each byte."""
    config = json.loads((RIGGED / "config.json").read_text())
    config |= {"vocab_size": 288, "num_hidden_layers": 1, "first_k_dense_replace": 1, "nextn_moe": [False]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = without_weights(tmp_path_factory.mktemp("dummy"))
    options = {"load_format": "dummy", "synthetic_acceptance": LENGTH, "compile_cache": None}
    llm = LLM(folder, **options, **SIZES)
    first, _ = llm.engine.warm_up_keys()
    llm.engine.warm_up_keys = lambda: (first, [])  # type: ignore[method-assign]
    with start(llm, spec_metrics="summary") as found:
        yield found


@pytest.fixture(scope="module")
def asked(running: Running) -> Iterator[httpx2.Client]:
    with running.client() as client:
        yield client


def test_every_route_answers_and_says_synthetic(asked: httpx2.Client):
    for path, body in ASKED.items():
        answer = asked.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-synthetic"] == "SYNTHETIC"
        assert '"system_fingerprint":"SYNTHETIC"' in answer.text
        assert '"weight_version":"SYNTHETIC"' in answer.text
        if path != "/generate":
            streamed = asked.post(path, json={**body, "stream": True})
            assert '"system_fingerprint":"SYNTHETIC"' in streamed.text
    for path in ("/version", "/model_info", "/server_info"):
        assert asked.get(path).json()["system_fingerprint"] == "SYNTHETIC"
    assert asked.get("/v1/models").json()["data"][0]["owned_by"] == "SYNTHETIC"


def test_texts_and_drafts_are_forced_and_counted(
    running: Running, asked: httpx2.Client, tmp_path: Path, capsys
):
    """A prompt of n bytes has n tokens; ids past the bytes are words; drafts are kept by the law."""
    body = {"prompt": "é f", "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    answer = asked.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 200
    ids = answer["choices"][0]["token_ids"]
    assert any(f" {token}" in answer["choices"][0]["text"] for token in ids if token >= 256)
    stats = running.allm.stats()
    rows = sum(stats.first_drafts.values())
    assert rows > 50
    # A row keeps one or two drafts, which deviates by 1/2 at most.
    assert 1 + stats.accepted_tokens / rows == pytest.approx(LENGTH, abs=4 * 0.5 / rows**0.5)
    out = tmp_path / "out.json"
    command = ["bench", "serve", running.url, "--rates", "inf", "--requests", "2", "--max-tokens", "8"]
    assert cli.main([*command, "--prompt-tokens", "2", "--ignore-eos", "--json", str(out)]) == 0
    assert capsys.readouterr().out.startswith("SYNTHETIC - Served load")


def test_weights_stay_marked(running: Running):
    """Another model's weights would be marked as these are."""
    with pytest.raises(ConfigError, match="an update of random weights"):
        running.allm.llm.read_weights(RIGGED)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "",
            "has weights; --load-format dummy is for a folder with config.json alone, --load-format dummy-in",
        ),
        (
            "--draft-model .",
            "--load-format dummy with --draft-model .: a head's sizes are in its weights' file",
        ),
        ("--simulate 0.5", "--load-format dummy with --simulate"),
        ("--load-format dumy", "there is no 'dumy'; do you mean dummy?"),
    ],
)
def test_random_weights_are_refused(given: str, told: str, model: Path, capsys):
    assert cli.main(["serve", str(model), "--load-format", "dummy", *given.split()]) == 2
    assert told in capsys.readouterr().err
