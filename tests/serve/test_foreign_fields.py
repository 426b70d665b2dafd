"""Fields that change an answer elsewhere: obeyed, or refused with the field to use instead, never dropped."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mtp_jax import CompletionOutput
from serve.bodies.foreign import is_neutral
from serve.routes.chat import _Chat
from tests.serve.conftest import Running

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
ASK = [{"role": "user", "content": "q"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 2},
    COMPLETIONS: {"prompt": "q", "max_tokens": 2},
    MESSAGES: {"messages": ASK, "max_tokens": 2},
    RESPONSES: {"input": "q", "max_output_tokens": 2},
    "/generate": {"text": "q", "sampling_params": {"max_new_tokens": 2}},
}
REFUSED = {
    "stop_regex": "a+",
    "typical_p": 0.9,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "mirostat": 2,
    "top_a": 0.1,
    "tfs_z": 0.95,
    "top_n_sigma": 1.5,
    "samplers": ["top_k"],
    "best_of": 4,
    "lora_path": "x",
    "adapter_id": "x",
    "models": ["a", "b"],
    "route": "fallback",
    "structural_tag": {"type": "structural_tag"},
    "kv_transfer_params": {"do_remote_prefill": True},
    "vllm_xargs": {"a": 1},
    "custom_logit_processor": "x",
    "return_hidden_states": True,
    "return_routed_experts": True,
    "do_sample": False,
    "num_beams": 4,
    "guided_json": {},
    "options": {"num_predict": 5},
    "instructions": "be short",
}
# Elsewhere than in the table: the values that clients send although they change nothing.
NEUTRAL = {
    "typical_p": 1, "dry_multiplier": 0.0, "xtc_probability": 0, "mirostat": 0, "top_a": 0, "tfs_z": 1.0,
    "top_n_sigma": -1, "samplers": [], "best_of": 1, "lora_path": None, "models": [], "route": "",
    "return_routed_experts": False, "return_hidden_states": False, "do_sample": True, "num_beams": 1,
    "length_penalty": 1.0,
    "modalities": ["text"], "kv_transfer_params": None, "include_reasoning": True, "separate_reasoning": True,
    "reasoning_format": "auto", "return_tokens_as_token_ids": False, "stop_regex": None,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused(client, name):
    value = REFUSED[name]
    for route in (CHAT, MESSAGES):
        answer = client.post(route, json={**BODIES[route], name: value})
        assert answer.status_code == 400, (route, answer.text)
        assert answer.json()["error"]["message"].startswith(f"{name}: not supported here; ")


@pytest.mark.parametrize("route", BODIES)
def test_values_that_change_nothing_go_on_working(server: Running, route):
    strict = server.variant(strict=True)
    for name, value in NEUTRAL.items():
        answer = strict.post(route, json={**BODIES[route], name: value})
        assert answer.status_code == 200, (name, answer.text)
        assert "warning" not in answer.headers


def test_true_is_no_number():
    assert is_neutral(1.0, (1,))
    assert not is_neutral(True, (1,))
    assert not is_neutral(0, (False,))


@pytest.mark.parametrize("name", ["lora_path", "custom_logit_processor", "return_hidden_states"])
def test_generate_refuses_them_beside_its_options_and_in_them(client, name):
    body = {"text": "q", "sampling_params": {"max_new_tokens": 2}}
    inside = {"text": "q", "sampling_params": {"max_new_tokens": 2, name: "x"}}
    for wrong in ({**body, name: "x"}, inside):
        assert client.post("/generate", json=wrong).status_code == 400


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_new_tokens",
        "n_predict",
        "num_predict",
    ],
)
def test_the_most_tokens_by_each_name(client, route, name):
    body = {key: value for key, value in BODIES[route].items() if "max" not in key}
    answer = client.post(route, json={**body, name: 3, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers
    usage = answer.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 3


def test_no_limit_by_llama_cpps_name(client):
    for name, value in (("n_predict", -1), ("num_predict", -2), ("max_tokens", -1)):
        answer = client.post(CHAT, json={"messages": ASK, name: value})
        assert answer.json()["usage"]["completion_tokens"] > 100
    # There it would be 16 tokens.
    assert client.post(COMPLETIONS, json={"prompt": "q", "n_predict": -1}).status_code == 400


def test_the_least_tokens_and_the_stop_string_by_other_names(client):
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 0}
    text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    stop = {"stop": [text[3:5]]}
    cut = client.post(COMPLETIONS, json={**body, **stop}).json()["choices"][0]["text"]
    kept = client.post(COMPLETIONS, json={**body, **stop, "no_stop_trim": True}).json()["choices"][0]["text"]
    assert kept == cut + text[3:5]
    longer = client.post(COMPLETIONS, json={**body, **stop, "min_new_tokens": 9})
    assert longer.json()["usage"]["completion_tokens"] >= 9
    assert "warning" not in longer.headers


@pytest.mark.parametrize("name", ["add_special_tokens", "add_bos_token"])
def test_a_prompt_that_was_rendered_elsewhere_gets_no_second_bos(client, server: Running, monkeypatch, name):
    tokenizer, added = server.allm.llm.tokenizer, list[bool]()
    assert tokenizer
    encode = tokenizer.encode

    def noted(text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        added.append(add_special_tokens)
        return encode(text, add_special_tokens, most)

    monkeypatch.setattr(tokenizer, "encode", noted)
    body = {"prompt": "<eos>abc", "max_tokens": 2, "echo": True}
    for more in ({}, {"truncate_prompt_tokens": 2}):
        for value in (True, None, False):
            answer = client.post(COMPLETIONS, json={**body, **more, name: value})
            assert answer.status_code == 200, answer.text
            assert "warning" not in answer.headers
            assert answer.json()["choices"][0]["text"].startswith("bc" if more else "<eos>abc")
    assert added == [True, True, False] * 2
    assert client.post(CHAT, json={**BODIES[CHAT], name: False}).status_code == 200
    assert client.post(CHAT, json={**BODIES[CHAT], name: True}).status_code == 400


def test_scores_may_name_tokens_by_their_ids(client):
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    body = {**BODIES[COMPLETIONS], **more, "logprobs": 1}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert [*choice["logprobs"]["top_logprobs"][0]] == names[:1]
    body = {**BODIES[CHAT], **more, "logprobs": True, "top_logprobs": 1}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == names[0]


@pytest.mark.parametrize(
    ("fields", "thought", "tagged"),
    [
        ({}, True, False),
        ({"include_reasoning": True, "reasoning_format": "deepseek"}, True, False),
        ({"include_reasoning": False}, False, False),
        ({"reasoning_format": "hidden"}, False, False),
        ({"separate_reasoning": False}, False, True),
        ({"reasoning_format": "none"}, False, True),
        ({"reasoning_format": "raw"}, False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_stand_apart_inside_or_nowhere(client, monkeypatch, fields, thought, tagged, stream):
    """The prompt opens a thought, which the model ends."""
    choice = _Chat.choice

    def said(call: Any, index: int, output: Any, c: CompletionOutput, begun: bool) -> Any:
        return choice(call, index, output, replace(c, text="a</think>b" if c.finish_reason else ""), begun)

    monkeypatch.setattr(_Chat, "choice", said)
    told = {"messages": ASK, "chat_template_kwargs": {"thinking": True}, "max_tokens": 2}
    answer = client.post(CHAT, json={**told, **fields, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers
    if stream:
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [line["choices"][0]["delta"] for line in lines]
    else:
        deltas = [answer.json()["choices"][0]["message"]]
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert any("reasoning" in delta for delta in deltas) == thought
    assert content == ("a</think>b" if tagged else "b")


def test_fields_of_chats_are_not_dropped_on_the_route_of_messages(client):
    for name, value, says in (
        ("stop", ["x"], "use stop_sequences"),
        ("seed", 1, "use /v1/chat/completions for it"),
        ("min_p", 0.1, "use /v1/chat/completions for it"),
        ("max_completion_tokens", 3, "use /v1/chat/completions for it"),
        ("enable_thinking", True, "use thinking"),
        ("repeat_penalty", 1.1, "use /v1/chat/completions for it"),
        ("cache_salt", "x", "use /v1/chat/completions for it"),
    ):
        refused = client.post(MESSAGES, json={**BODIES[MESSAGES], name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"{name}: not on this route; {says}"
    neutral = {"n": 1, "stop": None, "repetition_penalty": 1.0, "logprobs": False, "presence_penalty": 0}
    assert client.post(MESSAGES, json={**BODIES[MESSAGES], **neutral}).status_code == 200
