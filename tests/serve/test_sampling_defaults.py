"""What a model says of its own sampling, several names of a model, and a chat template in a file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_jax import LLM, CheckpointError, ConfigError, SamplingParams, demo_model
from mtp_jax.api.introduction import introduction
from mtp_jax.api.sampling_defaults import described, sampling_defaults
from mtp_jax.commands import cli
from mtp_jax.commands.serve import summary
from serve.bodies.schema import ChatBody, CompletionBody
from tests.serve.conftest import RATES, SIZES, Running, start

SAID: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
INTRODUCTION = {"about": "It <answers>.", "prompts": ["Ask this.", "Ask that."]}


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a generation_config.json."""
    folder = tmp_path_factory.mktemp("told") / "told"
    shutil.copytree(model, folder)
    more = {"do_sample": True, "eos_token_id": 1, "max_new_tokens": None}
    (folder / "generation_config.json").write_text(json.dumps(SAID | more))
    (folder / "introduction.json").write_text(json.dumps(INTRODUCTION))
    return folder


def simulated(folder: Path, **options: Any) -> LLM:
    return LLM(folder, simulate=RATES, simulated_step=0.0, **SIZES, **options)


def test_a_prompt_without_parameters_takes_the_models_own(told: Path, monkeypatch):
    llm = simulated(told)
    assert llm.default_sampling_params == SamplingParams(**SAID)
    seen: list[SamplingParams] = []
    make = llm.engine.make_requests

    def noted(ids: Any, params: SamplingParams, *rest: Any, **more: Any) -> Any:
        seen.append(params)
        return make(ids, params, *rest, **more)

    monkeypatch.setattr(llm.engine, "make_requests", noted)
    llm.generate("abc")
    llm.generate("abc", SamplingParams(max_tokens=4))
    assert seen == [SamplingParams(**SAID), SamplingParams(max_tokens=4)]
    assert simulated(told, sampling_defaults="none").default_sampling_params == SamplingParams()


def test_the_models_own_length_is_that_of_chats(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 131072}')
    usual = sampling_defaults(tmp_path, "model")
    assert usual == {"max_tokens": 131072}
    assert "max_tokens 131072 unless given" in described(usual)
    chat = {"messages": [{"role": "user", "content": "q"}]}
    limits = [{}, {"max_tokens": 3}, {"max_completion_tokens": 4}, {"min_tokens": 2**18}, {"max_tokens": -1}]
    found = [ChatBody.model_validate(chat | given).most_tokens(2**17) for given in limits]
    assert found == [2**17, 3, 4, 2**18, 2**17]
    assert ChatBody.model_validate(chat).most_tokens(None) is None
    body = CompletionBody.model_validate({"prompt": "q"})
    assert body.params(16, False, defaults=usual).max_tokens == 16


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"max_new_tokens": 0}, "max_tokens = 0"),
        ({"temperature": "hot"}, "temperature = 'hot'; expected a number from 0"),
        ({"top_p": 3}, "top_p = 3; expected a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k = 1.5"),
    ],
)
def test_what_is_out_of_range_names_the_file(told: Path, tmp_path: Path, value, says):
    folder = tmp_path / "wrong"
    shutil.copytree(told, folder)
    (folder / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        simulated(folder)
    assert says in str(caught.value)
    assert "--sampling-defaults none" in str(caught.value)
    assert simulated(folder, sampling_defaults="none").sampling_defaults == {}


def test_requests_take_what_they_do_not_name(told: Path, monkeypatch):
    with start(simulated(told)) as running:
        seen: list[SamplingParams] = []
        submit = running.allm.submit

        async def noted(prompt: Any, params: SamplingParams, **options: Any) -> Any:
            seen.append(params)
            return await submit(prompt, params, **options)

        monkeypatch.setattr(running.allm, "submit", noted)
        ask = {"role": "user", "content": "q"}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "q", "max_tokens": 2},
            "/v1/chat/completions": {"messages": [ask], "max_tokens": 2},
            "/v1/responses": {"input": "q", "max_output_tokens": 2},
            "/v1/messages": {"messages": [ask], "max_tokens": 2},
            "/generate": {"text": "q", "sampling_params": {"max_new_tokens": 2}},
        }
        with running.client() as client:
            for route, body in bodies.items():
                assert client.post(route, json=body).status_code == 200, route
            assert {p.max_tokens for p in seen} == {2}
            for route in ("/v1/completions", "/v1/messages"):
                client.post(route, json=bodies[route] | {"temperature": 1, "top_k": 7})
            client.post(
                "/generate", json={"text": "q", "sampling_params": {"top_p": 1.0, "max_new_tokens": 2}}
            )
        chosen = [{name: getattr(p, name) for name in SAID} for p in seen]
        assert chosen[:5] == [SAID] * 5
        assert chosen[5:7] == [SAID | {"temperature": 1, "top_k": 7}] * 2
        assert chosen[7] == SAID | {"top_p": 1}
        text = summary(running.allm, running.settings, running.url)
        said = ", ".join(f"{name} {value}" for name, value in SAID.items())
        assert f"sampling  {said} unless given" in text


def test_clients_are_told_the_models_own_and_its_introduction(told: Path, server: Running):
    with start(simulated(told, verifier="coupled")) as running:
        info = running.variant().get("/server_info").json()
    assert info["sampling_defaults"] == SAID
    assert info["introduction"] == INTRODUCTION
    assert info["verifier"] == "coupled"
    plain = server.variant().get("/server_info").json()
    assert (plain["sampling_defaults"], plain["introduction"]) == ({}, None)
    assert plain["verifier"] == "block"


@pytest.mark.parametrize(
    "value", [{}, {"about": 3}, {"about": "It answers.", "prompts": "Ask"}, {"about": "", "prompts": [{}]}]
)
def test_a_wrong_introduction_names_the_file(tmp_path: Path, value):
    (tmp_path / "introduction.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"introduction\.json has \{.*mend the file, or remove it"):
        introduction(tmp_path)


def test_the_embedded_model_samples_where_it_makes_sense_and_says_what_to_try():
    found = introduction(demo_model())
    assert found
    assert len(found.prompts) == 3
    assert 0 < sampling_defaults(demo_model(), "model")["temperature"] < 0.5


def test_it_is_said_at_the_start_where_the_model_says_nothing(server: Running):
    text = summary(server.allm, server.settings, server.url)
    assert "sampling  temperature 1 where a request names none" in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], SAID),
        (["--temperature", "0.2", "--top-k", "5"], SAID | {"temperature": 0.2, "top_k": 5}),
        (
            ["--sampling-defaults", "none"],
            {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1},
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_takes_them(told: Path, monkeypatch, capsys, command, options, wanted):
    seen: list[SamplingParams] = []
    monkeypatch.setattr(LLM, "__init__", lambda self, *a, **k: pytest.fail("loaded"))

    def stop(args: Any, *rest: Any) -> Any:
        raise ConfigError("far enough")

    monkeypatch.setattr(f"mtp_jax.commands.{command}.open_llm", stop)
    own = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: (own(self), seen.append(self))[0])
    prompt = ["-p", "x"] if command == "generate" else []
    assert cli.main([command, str(told), *prompt, *options]) == 2
    assert "far enough" in capsys.readouterr().err
    assert {name: getattr(seen[-1], name) for name in wanted} == wanted


def test_a_model_with_several_names(server: Running):
    variant = server.variant(model_names=("big", "claude-haiku-4-5"))
    listed = variant.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["big", "claude-haiku-4-5"]
    assert variant.get("/v1/models/claude-haiku-4-5").json()["id"] == "claude-haiku-4-5"
    ask = [{"role": "user", "content": "q"}]
    for route in ("/v1/chat/completions", "/v1/messages"):
        for name in ("big", "claude-haiku-4-5", None):
            answer = variant.post(route, json={"model": name, "messages": ask, "max_tokens": 2})
            assert answer.json()["model"] == (name or "big")
    refused = variant.post("/v1/completions", json={"model": "other", "prompt": "q"})
    assert refused.status_code == 404
    assert "this server has 'big', 'claude-haiku-4-5'" in refused.json()["error"]["message"]


def test_a_chat_template_in_a_file(model: Path, tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}>")
    llm = simulated(model, chat_template=file)
    assert llm.tokenizer
    turns = [{"role": "user", "content": "q"}]
    assert llm.tokenizer.apply_chat_template(turns) == "[q]>"
    assert llm.tokenizer.chat_template == file.read_text()
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja is not readable"):
        simulated(model, chat_template=tmp_path / "nowhere.jinja")
    assert cli.main(["chat", str(model), "--chat-template", str(tmp_path / "nowhere.jinja")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
