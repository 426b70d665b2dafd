"""Requests as clients in the field write them, each of a kind that nothing else here writes."""

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from serve.answers.inputs import arguments
from serve.base.sse import event
from serve.bodies import reading
from serve.bodies.messages import MessagesBody
from serve.bodies.responses import ResponsesBody
from tests.serve.conftest import Running

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "q"}


def raw(client: httpx2.Client, text: bytes, path: str = "/tokenize") -> httpx2.Response:
    return client.post(path, content=text, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\ude00a", "\ufffda"),
        (rb"\uD83Db\uDE00", "\ufffdb\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\ude00\ude00", "\U0001f600\ufffd"),
        (rb"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\ud83d\n\\", "\ufffd\n\\"),
        (rb"\ud800\uffff", "\ufffd\uffff"),
    ],
)
def test_half_of_a_character_is_replaced(written, meant):
    """A client that cuts the output of a tool within an emoji would lose its session."""
    assert reading._parsed(b'{"a": "' + written + b'", "b": "' + written + b'"}') == {"a": meant, "b": meant}


def test_text_of_windows_and_of_cut_emojis_is_read(client: httpx2.Client):
    plain = raw(client, b'{"prompt": "a"}')
    assert raw(client, b'\xef\xbb\xbf{"prompt": "a"}').json() == plain.json()
    whole = raw(client, b'{"messages": [{"role": "user", "content": "a\\ud83d"}], "max_tokens": 1}', CHAT)
    assert whole.status_code == 200
    for wrong in (
        rb'{"prompt": "\ud83"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud83d}',
        b"\xef\xbb",
    ):
        assert raw(client, wrong).status_code == 400, wrong


def test_halves_of_characters_cost_no_more_than_others(monkeypatch):
    calls = iter(range(10**6))
    monkeypatch.setattr(reading, "_replaced", lambda half: (next(calls), b"?")[1])
    with pytest.raises(ValueError, match=r"surrogate|hex escape"):
        reading._parsed(b'["' + rb"\ud83d" * 100_000 + b'"]')
    assert next(calls) == reading._MOST_HALVES


def test_answers_have_no_number_that_json_lacks(client: httpx2.Client):
    """Python reads 1e400 as infinity, and NaN; JavaScript's clients read neither."""
    body = b'{"input": "q", "max_output_tokens": 1, "metadata": {"a": 1e400}}'
    answer = json.loads(raw(client, body, RESPONSES).text, parse_constant=pytest.fail)
    assert answer["metadata"] == {"a": None}
    assert (
        event({"input": arguments('{"a": NaN, "b": -1e400}')}) == b'data: {"input":{"a":null,"b":null}}\n\n'
    )


def test_models_in_the_shapes_of_both_apis(server: Running, client: httpx2.Client):
    listed = client.get("/v1/models?limit=1000").json()
    assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, "tiny")
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as api:
        (model,) = api.models.list()
        one = api.models.retrieve("tiny")
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at == one.created_at
    assert model.created_at.timestamp() == listed["data"][0]["created"]


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema"}])
def test_a_schema_without_an_object_around_it_holds(client: httpx2.Client, form: dict[str, Any]):
    """Dropped, it would leave any JSON."""
    asked = {"messages": [USER], "max_tokens": 30, "response_format": {**form, "schema": {"const": "ab"}}}
    answer = client.post(CHAT, json=asked)
    assert answer.json()["choices"][0]["message"]["content"] == '"ab"'
    assert "warning" not in answer.headers


OFFERS = [("/v1/models", "h2c", 200), (RESPONSES, "websocket", 405)]


@pytest.mark.parametrize(("path", "protocol", "status"), OFFERS)
def test_offers_of_other_protocols_are_not_logged(client: httpx2.Client, caplog, path, protocol, status):
    """Java's client offers HTTP/2 with each request, and agents try a websocket first."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": protocol, "http2-settings": "AAEA"}
    assert client.get(path, headers=offer).status_code == status
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_openais_client_counts_tokens(server: Running, client: httpx2.Client):
    tools = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]
    asked: dict[str, Any] = {"input": [USER], "instructions": "Be short.", "tools": tools}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as api:
        found = api.responses.input_tokens.count(model="tiny", **asked)
    answer = client.post(RESPONSES, json={**asked, "max_output_tokens": 1}).json()
    assert found.object == "response.input_tokens"
    assert found.input_tokens == answer["usage"]["input_tokens"]


FORM = {"schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "field", "value", "says"),
    [
        (CHAT, "response_format", {"type": "json_schema"}, "needs json_schema"),
        (
            CHAT,
            "response_format",
            {"type": "json_schema", "json_schema": FORM, **FORM},
            "without schema beside",
        ),
        (CHAT, "response_format", {"type": "text", **FORM}, "not with the type text"),
        (CHAT, "response_format", {"type": "structural_tag"}, "has format, or structures and triggers"),
        (CHAT, "response_format", {"type": "json_object", "format": {}}, "and no other, has format"),
        (CHAT, "extra_body", {"top_k": 3}, "beside the others"),
        (CHAT, "messages", [{"role": "assistant", "function_call": {"name": "f"}}, USER], "use tool_calls"),
        ("/v1/completions", "prompt_embeds", "AA", "send token ids"),
        ("/generate", "token_ids_logprob", [1], "use top_logprobs_num"),
        ("/generate", "session_params", {"id": "a"}, "stores no session"),
        (RESPONSES, "tool_choice", {"type": "function", "function": {"name": "f"}}, "name: this field"),
        (RESPONSES, "background", True, "keeps no answer"),
    ],
)
def test_a_field_that_changes_an_answer_elsewhere_is_refused(client: httpx2.Client, path, field, value, says):
    asked = {"input": "q"} if path == RESPONSES else {"text": "q"} if path == "/generate" else {"prompt": "q"}
    wrong = client.post(
        path, json={"messages": [USER]} | {field: value} if path == CHAT else asked | {field: value}
    )
    assert wrong.status_code == 400
    assert says in wrong.json()["error"]["message"]


def test_values_that_change_nothing_are_taken(client: httpx2.Client):
    asked = {"messages": [USER], "max_tokens": 1, "modalities": [], "extra_body": {}, "stream": True}
    answer = client.post(CHAT, json={**asked, "stream_options": {"include_obfuscation": False}})
    assert (answer.status_code, answer.headers.get("warning")) == (200, None)
    stored = dict.fromkeys(("previous_response_id", "conversation", "prompt")) | {"background": False}
    answer = client.post(RESPONSES, json={"input": "q", "max_output_tokens": 1, **stored})
    assert (answer.status_code, answer.headers.get("warning")) == (200, None)


def told(*items: dict[str, Any], **fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": [USER, *items], **fields})


def test_changes_of_options_within_a_conversation_hold():
    """The last change of each option does, as on OpenAI's server."""
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    changes = [
        {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": schema}},
        USER,
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
    ]
    body = told(*changes, reasoning={"effort": "none"}, text={"format": {"type": "text"}})
    chat = body.conversation()
    assert getattr(chat.reasoning, "effort", None) == "high"
    assert getattr(chat.response_format, "wanted", None) == {"type": "object"}
    assert len(chat.messages) == 2
    assert not list(body.unknown())
    back = told(
        *changes, {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    ).conversation()
    assert getattr(back.response_format, "wanted", "") is None


def test_a_result_of_no_call_is_told_by_the_user():
    result = {"type": "function_call_output", "name": "clock", "output": "noon"}
    last = told(result).conversation().turns()[-1]
    assert last == {"role": "user", "content": "Result of clock:\nnoon"}


def test_a_result_that_is_an_error_says_so():
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no file", "is_error": True}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = MessagesBody.model_validate({"messages": turns, "max_tokens": 1})
    assert body.conversation().turns()[-1]["content"] == "Error: no file"


def test_a_result_of_nothing_is_empty(client: httpx2.Client):
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": None},
    ]
    assert client.post(CHAT, json={"messages": turns, "max_tokens": 1}).status_code == 200
    nothing = [*turns[:1], {**USER, "content": None}]
    assert client.post(CHAT, json={"messages": nothing}).status_code == 400
