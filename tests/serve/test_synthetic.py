"""A server whose acceptance is forced: clients see its length in /metrics, and a mark on every answer."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtp_jax import LLM
from mtp_jax.commands import cli
from mtp_jax.engine.engine import Engine
from tests.serve.conftest import RIGGED, SIZES, Running, Variant, start

pytestmark = pytest.mark.usefixtures("shared_programs")
LENGTH, DEPTH = 2.6, 3
PLAIN = {"prompt": "def f", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def labelled(server: Running, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """The simulated server's engine behind an application that takes it for a forced one."""
    about = server.allm.about
    engine = replace(about.engine, num_speculative_tokens=DEPTH, synthetic_acceptance=LENGTH)
    monkeypatch.setattr(server.allm, "about", replace(about, simulated=False, engine=engine))
    return server.variant()


def test_every_answer_is_marked(labelled: Variant):
    chat = [{"role": "user", "content": "hello"}]
    for path, sent in (
        ("/v1/completions", PLAIN),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 8}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 8, "messages": chat}),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 8}}),
    ):
        answer = labelled.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-synthetic"] == "SYNTHETIC"
        assert '"system_fingerprint":"SYNTHETIC"' in answer.text
        if path != "/generate":
            streamed = labelled.post(path, json={**sent, "stream": True})
            assert '"system_fingerprint":"SYNTHETIC"' in streamed.text
    assert labelled.get("/v1/models").json()["data"][0]["owned_by"] == "SYNTHETIC"
    assert labelled.get("/server_info").json()["system_fingerprint"] == "SYNTHETIC"
    assert 'mtp_jax:synthetic_acceptance_length{model_name="tiny"} 2.6' in labelled.get("/metrics").text


def test_a_model_is_not_marked(client: httpx2.Client):
    assert 'mtp_jax:synthetic_acceptance_length{model_name="tiny"} 0.0' in client.get("/metrics").text
    answer = client.post("/v1/completions", json=PLAIN)
    assert "x-synthetic" not in answer.headers
    assert "SYNTHETIC" not in answer.text


@pytest.fixture(scope="module")
def forced(model: Path, shared_programs: None) -> Iterator[Running]:
    """A server of the model itself."""
    options = {"synthetic_acceptance": LENGTH, "num_speculative_tokens": DEPTH, "compile_cache": None}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mtp_jax").addHandler(handler)
    llm = LLM(model, **options, **SIZES)
    logging.getLogger("mtp_jax").removeHandler(handler)
    assert [r for r in records if r.startswith("SYNTHETIC acceptance: length 2.6 (")]
    first, _ = llm.engine.warm_up_keys()
    llm.engine.warm_up_keys = lambda: (first, [])  # type: ignore[method-assign]
    with start(llm, spec_metrics="summary") as running:
        yield running


def counts(client: httpx2.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [s for family in families for s in family.samples]
    return {s.name + s.labels.get("position", ""): s.value for s in samples}


@pytest.mark.rest
def test_a_client_sees_the_length_in_the_metrics(forced: Running, tmp_path: Path, capsys):
    """Greedy and sampled, whole and streamed; and a benchmark of the server says what it measured."""
    with forced.client() as client:
        for i in range(8):
            body = {**PLAIN, "max_tokens": 200, "temperature": i % 2, "seed": i, "stream": i % 3 == 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert "SYNTHETIC" in answer.text
        found, name = counts(client), "vllm:spec_decode_num_"
        rows = found[f"{name}drafts_total"]
        kept = [found.get(f"{name}accepted_tokens_per_pos_total{i}", 0) for i in range(DEPTH)]
        assert rows > 500
        assert (kept[0], kept[2]) == (rows, 0)  # none but the two neighbouring lengths
        # A row's length is 2 or 3, which deviates by 1/2 at most.
        assert 1 + sum(kept) / rows == pytest.approx(LENGTH, abs=4 * 0.5 / rows**0.5)
        wanted = {"response_format": {"type": "json_object"}, "ignore_eos": False}
        for wrong, named in (({"logprobs": 1}, "logprobs"), (wanted, "structured output")):
            refused = client.post("/v1/completions", json={**PLAIN, **wrong})
            assert refused.status_code == 400
            assert f"{named} means nothing here: acceptance is SYNTHETIC" in refused.text
    assert forced.allm.llm.probe_drafts() is None  # of an update of the weights: it would be the law's
    assert forced.uvicorn._alarm._limits == {"low": 0, "high": 1}
    out = tmp_path / "out.json"
    command = ["bench", "serve", forced.url, "--rates", "inf", "--requests", "2", "--max-tokens", "30"]
    assert cli.main([*command, "--prompt-tokens", "2", "--ignore-eos", "--json", str(out)]) == 0
    assert capsys.readouterr().out.startswith("SYNTHETIC - Served load")
    assert json.loads(out.read_text())["title"].startswith("SYNTHETIC - ")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "--synthetic-acceptance glm-9",
            "glm-9; expected a number, or one of glm-5.2, v4-pro",
        ),
        ("--synthetic-acceptance 4.5", "expected a length from 1, the model's own token, to 4, as"),
        ("--synthetic-acceptance 2 --num-speculative-tokens 0", "expected drafts to keep"),
        ("--synthetic-acceptance 0.8,1.2", "--synthetic-acceptance 0.8,1.2; expected shares from 0 to 1"),
        (
            "--synthetic-acceptance 0.8,0.7,0.6,0.5",
            "expected 3 shares at most, as",
        ),
        (
            "--synthetic-acceptance 2 --suffix-drafts",
            "--suffix-drafts: a row without a match has no",
        ),
        ("--synthetic-acceptance 2 --strict-draft", "--strict-draft with --synthetic-acceptance 2.0: a law"),
        ("--synthetic-acceptance-length 2", "use --synthetic-acceptance"),
    ],
)
def test_a_wrong_law_is_refused_before_weights_are_read(given: str, told: str, tmp_path: Path, capsys):
    """The folder has none."""
    (tmp_path / "config.json").write_bytes((RIGGED / "config.json").read_bytes())
    assert cli.main(["serve", str(tmp_path), *given.split()]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert (out, err.count("error: ")) == ("", 1)


@pytest.mark.rest
def test_a_batch_is_marked_and_its_depth_is_fixed(
    forced: Running, model: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Engine, "prepare", lambda *given, **named: None)  # it has the server's programs
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**PLAIN, "model": "tiny"}}
    source.write_text(json.dumps(line) + "\n")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    options = [*sizes, "--no-compile-cache", "--synthetic-acceptance", f"{LENGTH}"]
    assert cli.main(["batch", str(source), str(target), str(model), *options]) == 0
    err = capsys.readouterr().err
    body = json.loads(target.read_text())["response"]["body"]
    assert body["system_fingerprint"] == "SYNTHETIC"
    assert err.splitlines()[-1].startswith("SYNTHETIC acceptance: length 2.6 (")
    assert "at depth 3" in err
    assert "at depth 0" not in err
