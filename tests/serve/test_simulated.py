"""A server without a model: what it says is right, and marked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from mtp_jax import LLM, ConfigError, SamplingParams
from mtp_jax.commands import cli
from mtp_jax.simulate.language import mix
from tests.serve.conftest import SIZES, Running, start, weightless

RATES = (0.8, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    return weightless(tmp_path_factory.mktemp("weightless"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with start(LLM(folder, simulate=RATES, simulated_step=0.01, **SIZES), spec_metrics="summary") as found:
        yield found


@pytest.fixture(scope="module")
def asked(running: Running) -> Iterator[httpx2.Client]:
    with running.client() as client:
        yield client


def test_completions_are_the_languages_text_and_drafts_are_kept_as_often_as_the_rates_say(folder: Path):
    llm = LLM(folder, simulate=RATES, simulated_step=0.0, **SIZES)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [[5 + i, 9, 11] for i in range(20)]
    outputs = llm.generate(prompts, params)
    language = llm.engine.runner.language  # type: ignore[attr-defined]
    kept, offered = [0, 0], [0, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        (one,) = output.outputs
        text = list(prompt)
        while len(text) < len(prompt) + 200:
            text.append(language.next(mix(language.total(text))))
        assert list(one.token_ids) == text[len(prompt) :]
        assert one.text.isprintable()
        for k in (0, 1):
            kept[k] += sum(a > k for a in one.speculation.accepted_per_step)
            offered[k] += sum(a >= k for a in one.speculation.accepted_per_step)
    for k, n, rate in zip(kept, offered, RATES, strict=True):
        assert abs(k / n - rate) < 4 * (rate * (1 - rate) / n) ** 0.5, (k, n, rate)


def test_every_answer_is_marked(asked: httpx2.Client):
    body = {"prompt": "def f", "max_tokens": 8, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    for path, sent in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        answer = asked.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-simulated"] == "SIMULATED"
        assert answer.json()["system_fingerprint"] == "SIMULATED"
        assert answer.json()["choices"][0]["weight_version"] == "SIMULATED"
        assert answer.json()["usage"]["completion_tokens"] > 0
        streamed = asked.post(path, json={**sent, "stream": True})
        assert streamed.headers["x-simulated"] == "SIMULATED"
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {json.loads(e)["system_fingerprint"] for e in events} == {"SIMULATED"}
    for path, sent in (
        ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 8, "messages": chat["messages"]}),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 8}}),
    ):
        answer = asked.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-simulated"] == "SIMULATED"
        assert '"weight_version":"SIMULATED"' in answer.text
    for path in ("/health", "/v1/models", "/metrics", "/no/such"):
        assert asked.get(path).headers["x-simulated"] == "SIMULATED"
    assert asked.get("/v1/models").json()["data"][0]["owned_by"] == "SIMULATED"
    assert 'mtp_jax:simulated{model_name="tiny"} 1.0' in asked.get("/metrics").text


def test_openais_client_takes_it(running: Running):
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    answer = client.chat.completions.create(**ask, response_format=wanted)
    assert json.loads(answer.choices[0].message.content) in ("yes", "no")
    assert answer.system_fingerprint == "SIMULATED"
    ask |= {"max_tokens": 30, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert {c.system_fingerprint for c in chunks} == {"SIMULATED"}


def test_a_model_is_not_marked(real: Running):
    with real.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert client.get("/v1/models").json()["data"][0]["owned_by"] == "mtp-jax"
        assert "x-simulated" not in answer.headers
        assert "SIMULATED" not in answer.text
        assert 'mtp_jax:simulated{model_name="tiny"} 0.0' in client.get("/metrics").text


def test_what_needs_weights_is_refused(folder: Path):
    llm = LLM(folder, simulate=RATES, simulated_step=0.0, **SIZES)
    assert (llm.simulated, llm.weight_bytes, llm.weight_version) == (True, 0, "SIMULATED")
    for refused in (lambda: llm.score([5]), lambda: llm.read_weights(folder)):
        with pytest.raises(ConfigError, match="needs weights, but the model is simulated"):
            refused()
    with pytest.raises(ConfigError, match="expected a list of 'cache'"):
        llm.release_memory(["weights"])
    llm.release_memory()
    llm.resume_memory()
    draft = llm.draft([5, 6, 7], 2)
    assert len(draft.token_ids) == 2
    for options in ({"suffix_drafts": True}, {"draft_model": folder}, {"simulate": (1.5,)}):
        with pytest.raises(ConfigError, match=r"simulated model|expected probabilities"):
            LLM(folder, **{"simulate": RATES, **SIZES, **options})


@pytest.mark.parametrize("rates", ["high", "0.8,1.2", ""])
def test_rates_that_are_none(capsys, rates):
    assert cli.main(["serve", "--simulate", rates]) == 2
    assert "is not a list of numbers from 0 to 1" in capsys.readouterr().err


def test_an_answer_has_its_times_if_it_is_asked_for_them(asked: httpx2.Client):
    body = {"prompt": [5, 9], "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    plain = asked.post("/v1/completions", json=body).json()["metrics"]
    assert plain.keys() == {"speculative_decoding"}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = asked.post("/v1/completions", json=body | stream | {"include_metrics": True}).text
    last = streamed.strip().split("\n\n")[-2]  # before [DONE]
    whole = asked.post("/v1/completions", json=body | {"include_metrics": True}).json()
    conversation = {"input": "abc", "max_output_tokens": 30, "include_metrics": True}
    response = asked.post("/v1/responses", json=conversation).json()
    for answer in (whole, json.loads(last.removeprefix("data: ")), response):
        found, usage = answer["metrics"], answer["usage"]
        gaps = (usage.get("completion_tokens") or usage["output_tokens"]) - 1
        assert 0 <= found["queue_time_ms"] <= found["time_to_first_token_ms"]
        assert found["mean_itl_ms"] * gaps == pytest.approx(found["generation_time_ms"], rel=1e-3)
        assert found["tokens_per_second"] * found["mean_itl_ms"] == pytest.approx(1000, rel=1e-3)
        assert 0 < found["accepted_draft_tokens"] <= found["draft_tokens"]
        assert found["cached_tokens"] >= 0
    drafts = whole["metrics"]["speculative_decoding"]
    assert drafts["num_draft_tokens"] == whole["metrics"]["draft_tokens"]
    several = asked.post("/v1/completions", json=body | {"n": 2, "include_metrics": True}).json()["metrics"]
    assert several == {"speculative_decoding": None}


def test_an_operator_may_have_times_in_every_answer(running: Running):
    variant = running.variant(spec_metrics="none", request_metrics=True)
    body = {"prompt": [5], "max_tokens": 1, "ignore_eos": True}
    found = variant.post("/v1/completions", json=body).json()["metrics"]
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (None, None)
    assert found["time_to_first_token_ms"] > 0
    assert "metrics" not in variant.post("/v1/completions", json=body | {"include_metrics": False}).json()
