"""/v1/chat/completions."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_jax import LLM, SamplingParams, Thoughts
from mtp_jax.text.grammar import Grammars
from tests.serve.helpers import events

HI = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"
GREEDY = {"messages": HI, "temperature": 0, "ignore_eos": True, "max_tokens": 20}


def chat(client, status=200, **body):
    body = {**GREEDY, **body}
    response = client.post(PATH, json=body)
    assert response.status_code == status, response.text
    return response.json()


def deltas(client, **body):
    return [c["choices"][0] for c in events(client, PATH, **{**GREEDY, **body}) if c["choices"]]


def joined(choices, key):
    return "".join(c["delta"].get(key) or "" for c in choices)


def test_the_template_is_rendered(client, fresh: LLM):
    expected = fresh.generate(
        "user: hi\nassistant:", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    answer = chat(client)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected[0].outputs[0].text, "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_streamed_deltas_equal_the_message(client):
    choices = deltas(client)
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in c["delta"] for c in choices[1:])
    assert joined(choices, "content") == chat(client)["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == "length"


def test_unknown_fields_of_messages_and_their_parts_are_warned_of(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "tone": {}}]
    messages = [{"role": "user", "content": parts, "mood": "good"}]
    told = client.post(PATH, json={**GREEDY, "messages": messages}).headers["warning"]
    assert told == '299 mtp-jax "ignored: messages.0.mood, messages.0.content.1.tone"'


def test_messages_of_every_kind(client):
    def rendered(*messages) -> str:
        tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert rendered({"role": "user", "content": parts}) == rendered(*HI) == "user: hi\nassistant:"
    developer = rendered({"role": "developer", "content": "x"}, *HI)
    assert developer == rendered({"role": "system", "content": "x"}, *HI) == "system: x\nuser: hi\nassistant:"
    turns = [*HI, {"role": "assistant", "content": "a", "reasoning": "b"}, *HI]
    assert rendered(*turns) == "user: hi\nassistant: a\nuser: hi\nassistant:"
    assert chat(client, messages=turns)["choices"]


def test_a_prompt_may_end_in_another_way(client):
    def tokens(**body):
        ids = client.post("/tokenize", json=body).json()["tokens"]
        return client.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    answer = {"role": "assistant", "content": " It is  "}
    assert tokens(messages=[*HI, answer], continue_final_message=True) == "user: hi\nassistant:  It is  "
    assert tokens(messages=HI, add_generation_prompt=True).endswith("assistant:")
    (choice,) = chat(client, messages=[*HI, answer], continue_final_message=True)["choices"]
    begun = {
        "prompt": "user: hi\nassistant:  It is  ",
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 20,
    }
    same = client.post("/v1/completions", json=begun).json()["choices"][0]["text"]
    assert choice["message"]["content"] == same
    cut = chat(client, truncate_prompt_tokens=5, prompt_logprobs=0)
    assert cut["usage"]["prompt_tokens"] == 5
    first, *rest = cut["prompt_logprobs"]
    assert first is None
    assert len(rest) == 4


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages", "needs text"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages", "'system', 'developer'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages", "assistant"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
                ]
            },
            "messages",
            "text",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"continue_final_message": True}, "continue_final_message", "must be the assistant's"),
        (
            {"messages": [{"role": "assistant"}], "continue_final_message": True},
            None,
            "the last message has no text",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs", "boolean"),
    ],
)
def test_wrong_conversations_say_what_to_change(client, body, param, says):
    error = chat(client, 400, **body)["error"]
    assert says in error["message"]
    assert error["param"] == param


def test_logprobs(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == choice["message"]["content"]
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == max(t["logprob"] for t in token["top_logprobs"])
        assert token["logprob"] == token["top_logprobs"][0]["logprob"]  # greedy
    streamed = [t for c in deltas(client, logprobs=True, top_logprobs=3) for t in c["logprobs"]["content"]]
    assert [t["token"] for t in streamed] == [t["token"] for t in content]
    assert all(
        not t["top_logprobs"] for t in chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    )


def test_max_completion_tokens_goes_before_max_tokens(client):
    answer = chat(client, max_tokens=9, max_completion_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4


def test_without_max_tokens_the_context_is_the_limit(client):
    answer = chat(client, max_tokens=None)
    assert answer["usage"]["total_tokens"] == 252


def test_a_template_that_opens_a_thought(client):
    answer = chat(client, chat_template_kwargs={"thinking": True})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"] == ""  # the model never closes it
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
    choices = deltas(client, chat_template_kwargs={"thinking": True})
    assert joined(choices, "reasoning") == joined(choices, "reasoning_content") == message["reasoning"]
    assert joined(choices, "content") == ""
    assert "completion_tokens_details" not in chat(client)["usage"]


def test_a_thought_goes_before_structured_output(client):
    thinking = {"thinking": True}
    (free,) = chat(client, chat_template_kwargs=thinking)["choices"]
    structured = {"response_format": {"type": "json_object"}, "ignore_eos": False}
    (choice,) = chat(client, 200, **structured, chat_template_kwargs=thinking)["choices"]
    assert choice["message"]["reasoning"] == free["message"]["reasoning"]
    assert choice["message"]["content"] == ""  # the model never closes it


def test_other_chats_do_not_wait_for_grammars(client, monkeypatch):
    matcher, begun, go = Grammars.matcher, threading.Semaphore(0), threading.Event()

    def slow(*args: Any) -> Any:
        begun.release()
        assert go.wait(60)
        return matcher(*args)

    monkeypatch.setattr(Grammars, "matcher", slow)
    structured = {"response_format": {"type": "json_object"}, "ignore_eos": False}
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = [pool.submit(lambda: chat(client, 200, **structured)) for _ in range(2)]
            assert all(begun.acquire(timeout=60) for _ in waiting)
            assert chat(client)["usage"]["completion_tokens"] == 20
            assert not any(w.done() for w in waiting)
        finally:
            go.set()
        assert all(w.result()["choices"] for w in waiting)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "thinking", "may_think", "expected"),
    [
        ("a < b</think>answer", True, True, ("a < b", "answer")),
        ("never closed </thi", True, True, ("never closed </thi", "")),
        ("\n<think>x</think>y</think>", False, True, ("x", "y</think>")),
        ("<thin air", False, True, ("", "<thin air")),
        ("<think>x</think>y", False, False, ("", "<think>x</think>y")),
        ("", True, True, ("", "")),
    ],
)
def test_thoughts_are_split_however_the_text_is_cut(size, text, thinking, may_think, expected):
    splitter = Thoughts(may_think).splitter(thinking)
    pieces = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(splitter.flush())
    assert tuple("".join(p) for p in zip(*pieces, strict=True)) == expected
