"""Conversations that do not go together, and what is known under several names."""

import json
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from mtp_jax import CallArguments, CallBegin
from serve.answers.asking import ChatPrompt
from serve.answers.calls import Call
from serve.answers.inputs import Inputs
from serve.base.settings import Settings
from serve.bodies.schema import ChatBody
from tests.serve.conftest import Running, wait_until
from tests.text.helpers import ASSISTANT, BOS, EOS, USER, loaded, release

ASK: dict[str, Any] = {"role": "user", "content": "q"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SHORT = {"max_tokens": 2}


def call(id: str, name: str = "f") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(id) for id in ids]}


def result(id: str, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def prompt_of(client: httpx2.Client, **body: Any) -> str:
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]


def refusal(client: httpx2.Client, route: str, **body: Any) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def test_results_stand_as_their_calls(client):
    turns = [ASK, calls("A", "B"), result("B", "noon"), result("A", "sunny")]
    prompt = prompt_of(client, messages=turns)
    assert prompt.index("sunny") < prompt.index("noon")
    # Ids may be used again, and something may come between a call and its result.
    turns += [calls("A"), ASK, result("A", "rain")]
    prompt = prompt_of(client, messages=turns)
    assert prompt.index("noon") < prompt.index("rain") < prompt.rindex("user: q")


def test_results_stand_as_their_calls_in_messages(client):
    uses = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in "AB"]
    told = {"B": "noon", "A": "sunny"}
    results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in told.items()]
    turns = [ASK, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    right = [ASK, calls("A", "B"), result("A", "sunny"), result("B", "noon")]
    counted = client.post(f"{MESSAGES}/count_tokens", json={"messages": turns}).json()["input_tokens"]
    assert counted == client.post("/tokenize", json={"messages": right}).json()["count"]
    wrong = {**results[0], "tool_use_id": "C"}
    turns[-1] = {"role": "user", "content": [wrong]}
    assert "result of the call 'C'" in refusal(client, MESSAGES, messages=turns, **SHORT)


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([result("A")], "a result of the call 'A', and no message before it has that call"),
        ([calls("A"), result("B")], "a result of the call 'B'"),
        ([result("A"), calls("A")], "a result of the call 'A'"),
        ([calls("A"), result("A"), result("A")], "the call 'A' has two results; send one"),
        ([calls("A", "A"), result("A")], "two calls of a message have the id 'A'"),
        ([calls("A", "B"), result("B")], "the call 'A' has no result, and others of its message have"),
        ([{**ASK, "prefix": True}], "not with user's"),
        (
            [{"role": "assistant", "content": "a", "prefix": True}, ASK],
            "only the last message can be",
        ),
        ([{**calls("A"), "content": "a", "prefix": True}], "has calls of tools; send their results"),
    ],
)
def test_what_does_not_go_together_is_refused(client, turns, says):
    assert says in refusal(client, CHAT, messages=[ASK, *turns])


def test_many_results_are_paired_in_one_pass(client):
    turns: list[Any] = [ASK]
    for i in range(2000):
        turns += [calls(f"c{i}"), result(f"c{i}")]
    answer = client.post(CHAT, json={"messages": turns})
    assert "prompt is too long" in answer.json()["error"]["message"]


@pytest.mark.parametrize("mark", ["prefix", "partial"])
def test_the_model_goes_on_with_the_last_message(client, mark):
    begun = {"role": "assistant", "content": "The answer is ("}
    prompt = prompt_of(client, messages=[ASK, begun], continue_final_message=True)
    assert prompt.endswith("The answer is (")
    assert prompt_of(client, messages=[ASK, {**begun, mark: True}]) == prompt
    blocks = [{"type": "text", "text": "The answer "}, {"type": "text", "text": "is ("}]
    for content in (begun["content"], blocks):
        turns = [ASK, {"role": "assistant", "content": content}]
        counted = client.post(f"{MESSAGES}/count_tokens", json={"messages": turns}).json()["input_tokens"]
        assert counted == len(prompt)
    answer = client.post(MESSAGES, json={"messages": turns, "max_tokens": 4, "temperature": 0}).json()
    same = client.post(
        CHAT, json={"messages": [ASK, {**begun, mark: True}], "max_tokens": 4, "temperature": 0}
    )
    assert answer["content"][0]["text"].strip() == same.json()["choices"][0]["message"]["content"].strip()
    empty = [ASK, {"role": "assistant", "content": " "}]
    assert "has no text" in refusal(client, MESSAGES, messages=empty, **SHORT)


def test_tasks_and_reminders_reach_the_encoder_that_knows_them(client, tmp_path):
    """DeepSeek-V4's template; another has no place for them."""
    tokenizer = loaded(release(tmp_path, "deepseek_v4"))
    server: Any = SimpleNamespace(tokenizer=tokenizer, tool_format="deepseek_v4", settings=Settings("tiny"))

    def prompt(*turns: dict[str, Any], **fields: Any) -> str:
        ids = ChatPrompt(server, ChatBody.model_validate({"messages": [*turns], **fields}))()
        return tokenizer.decode(ids, skip_special_tokens=False)

    reminder = {"role": "latest_reminder", "content": "May"}
    assert (
        prompt(reminder, ASK, task="query")
        == f"{BOS}<\uff5clatest_reminder\uff5c>May{USER}q<\uff5cquery\uff5c>"
    )
    said = {"role": "assistant", "content": "a"}
    assert prompt(ASK, said, task="title", thinking={"type": "disabled"}) == (
        f"{BOS}{USER}q{ASSISTANT}</think>a{EOS}<\uff5ctitle\uff5c>"
    )
    assert prompt(ASK, reasoning_effort="max").startswith(f"{BOS}Reasoning Effort: Absolute maximum")
    assert prompt(ASK, reasoning_effort="none") == f"{BOS}{USER}q{ASSISTANT}</think>"
    for turns, fields, says in (
        ([ASK], {"task": "query"}, "this model's chat template knows neither"),
        ([reminder, ASK], {}, "this model's chat template knows neither"),
        ([ASK, said], {"task": "query"}, "task: belongs to the user's message at the end"),
        ([ASK], {"task": "title"}, "task: belongs to the user's message at the end"),
        ([ASK], {"task": "sing"}, "task"),
    ):
        assert says in refusal(client, CHAT, messages=turns, **fields, **SHORT)


THINKS = "assistant:<think>"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "reasoning": {"effort": "high"}}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, False),
    ],
)
def test_thinking_is_switched_by_each_name(client, fields, thinks):
    assert prompt_of(client, messages=[ASK], **fields).endswith(THINKS) == thinks
    answer = client.post(CHAT, json={"messages": [ASK], **fields, **SHORT})
    assert answer.status_code == 200
    assert "warning" not in answer.headers
    if "chat_template_kwargs" not in fields:
        body = {"input": "q", "max_output_tokens": 2, **fields}
        assert "warning" not in client.post(RESPONSES, json=body).headers


@pytest.mark.parametrize(
    "fields",
    [
        {"max_thinking_tokens": 3},
        {"thinking_token_budget": 3},
        {"thinking_budget": 3},
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
        {"reasoning": {"max_tokens": 3}},
    ],
)
def test_a_budget_of_thoughts_by_each_name(client, monkeypatch, fields):
    """It reaches the engine of a model with the tag; without it there is nothing to bound."""
    seen: list[Any] = []
    monkeypatch.setattr("serve.answers.generation.may_think", lambda tokenizer: True)
    monkeypatch.setattr(
        "serve.answers.asking._with_tools", lambda server, params, use: (seen.append(params), params)[1]
    )
    refused = client.post(CHAT, json={"messages": [ASK], **fields, **SHORT})
    assert "max_thinking_tokens = 3, but </think> is no token" in refused.json()["error"]["message"]
    assert [params.max_thinking_tokens for params in seen] == [3]
    monkeypatch.undo()
    answer = client.post(CHAT, json={"messages": [ASK], **fields, **SHORT})
    assert answer.status_code == 200
    assert "max_thinking_tokens (the model has no token </think>)" in answer.headers["warning"]


def test_text_in_a_schema_in_messages(client):
    schema = {"type": "object", "properties": {"to": {"enum": ["here"]}}, "required": ["to"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        answer = client.post(MESSAGES, json={"messages": [ASK], "max_tokens": 60, **fields})
        assert "warning" not in answer.headers
        assert json.loads(answer.json()["content"][0]["text"]) == {"to": "here"}


def test_an_effort_alone_switches_no_thinking_on_in_messages(client):
    body = {"messages": [ASK]}
    plain = client.post(f"{MESSAGES}/count_tokens", json=body).json()
    told = client.post(f"{MESSAGES}/count_tokens", json={**body, "output_config": {"effort": "high"}})
    assert told.json() == plain
    assert told.headers["warning"] == '299 mtp-jax "ignored: output_config.effort"'  # the template has none


# Sent by clients without being asked, and without effect on an answer of this server.
@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "q", "cache_control": {"type": "e"}}],
                    },
                    {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None},
                    ASK,
                ],
                "user": "me",
                "metadata": {"a": "b"},
                "store": False,
                "service_tier": "auto",
                "prompt_cache_key": "k",
                "safety_identifier": "s",
                "modalities": ["text"],
                "verbosity": "low",
                **SHORT,
            },
        ),
        (
            RESPONSES,
            {
                "input": [{"role": "user", "content": "q"}],
                "max_output_tokens": 2,
                "user": "me",
                "metadata": {"a": "b"},
                "store": True,
                "service_tier": "auto",
                "prompt_cache_key": "k",
                "safety_identifier": "s",
                "text": {"format": {"type": "text"}, "verbosity": "low"},
                "reasoning": {"effort": None, "summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "max_tool_calls": 3,
            },
        ),
        (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "q", "citations": None}]}],
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                "metadata": {"user_id": "u"},
                "service_tier": "auto",
                "cache_control": {"type": "ephemeral"},
                "thinking": {"type": "adaptive", "display": "omitted"},
                **SHORT,
            },
        ),
    ],
)
def test_official_fields_are_known(server: Running, route, fields):
    answer = server.variant(strict=True).post(route, json=fields)
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("route", "body", "says"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: is not text"),
        (CHAT, {"messages": [ASK], "modalities": ["text", "audio"]}, "modalities: not supported here"),
        (CHAT, {"messages": [ASK], "tool_choice": {"type": "web_search"}}, "runs none itself"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes no images"),
        (RESPONSES, {"input": "q", "tool_choice": {"type": "web_search"}}, "runs none itself"),
        (RESPONSES, {"input": "q", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "no tools"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored here"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], **SHORT},
            "takes no images",
        ),
        (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}],
                **SHORT,
            },
            "takes no images",
        ),
        (
            MESSAGES,
            {
                "messages": [ASK],
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
                **SHORT,
            },
            "there are no tools",
        ),
    ],
)
def test_what_is_not_here_is_said_in_words(client, route, body, says):
    message = refusal(client, route, **body)
    assert says in message
    assert "_kind" not in message


def test_documents_of_text_and_blocks_of_other_servers(client):
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one "}},
        {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "two "}]},
        {"type": "text", "text": "three"},
    ]
    again = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "found"},
    ]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": again}, ASK]
    plain = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "found"}, ASK]
    answer = client.post(f"{MESSAGES}/count_tokens", json={"messages": turns})
    assert answer.json() == client.post(f"{MESSAGES}/count_tokens", json={"messages": plain}).json()
    assert answer.headers["warning"] == (
        '299 mtp-jax "ignored: messages.1.content.0.server_tool_use, '
        'messages.1.content.1.web_search_tool_result, messages.1.content.2.redacted_thinking"'
    )


def test_items_of_tools_that_a_client_runs(client):
    local = {"type": "local_shell_call", "id": "i", "call_id": "L", "action": {}, "status": "completed"}
    turns = [
        {"role": "user", "content": "q"},
        local,
        {"type": "local_shell_call_output", "id": "L", "output": "y"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "q"},
    ]
    answer = client.post(RESPONSES, json={"input": turns, "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers
    shell = {"type": "shell_call", "call_id": "S", "action": {"commands": ["ls"]}}
    told = {"type": "shell_call_output", "call_id": "S", "output": [{"stdout": "x"}]}
    answer = client.post(RESPONSES, json={"input": [turns[0], shell, told], "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    with_orphan = [*turns, {"type": "custom_tool_call_output", "call_id": "C", "output": "z"}]
    assert "the call 'C'" in refusal(client, RESPONSES, input=with_orphan)


CUSTOM = {"type": "custom", "custom": {"name": "say", "description": "Says it."}}


def test_a_custom_tool_of_a_chat(client):
    body = {
        "messages": [ASK],
        "tools": [CUSTOM, {"type": "web_search"}],
        "tool_choice": {"type": "custom", "custom": {"name": "say"}},
        "max_tokens": 150,
    }
    answer = client.post(CHAT, json={**body, "seed": 1})
    assert answer.headers["warning"] == '299 mtp-jax "ignored: tools.1.web_search"'
    (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]["name"]) == ("custom", "say")
    assert made["custom"]["input"]
    lines = client.post(CHAT, json={**body, "seed": 1, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "say")
    assert "".join(d["custom"]["input"] for d in deltas) == made["custom"]["input"]
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [made]}, result(made["id"])]
    assert json.dumps({"input": made["custom"]["input"]}) in prompt_of(client, messages=turns)


TEXTS = ['a"b\\c\n\té', "\U0001f600 end", "", " lead"]


@pytest.mark.parametrize(
    ("text", "ascii_only"), [*((t, a) for t in TEXTS for a in (True, False)), ("\ud83d alone", True)]
)
def test_the_text_of_a_custom_call_at_any_cut(text, ascii_only):
    arguments = ' { "input" : ' + json.dumps(text, ensure_ascii=ascii_only) + " } "
    wanted = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for size in (1, 2, 3, 7, len(arguments)):
        inputs = Inputs(frozenset({"say"}))
        inputs.push([CallBegin(0, "say", "c")])
        parts = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        pieces = [p for part in parts for p in inputs.push([CallArguments(0, part)])]
        assert "".join(p.text for p in pieces if isinstance(p, CallArguments)) == wanted


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\x41 \d+ \\d \"q\" \n", '\\x41 \\d+ \\d "q" \n'),
        (r"a\u12", r"a\u12"),
        (r"\uZZ \u0041\u00", r"\uZZ A\u00"),
        (r"C:\Users \'", r"C:\Users \'"),
    ],
)
def test_escapes_that_json_does_not_know_stand_for_themselves(written, meant):
    arguments = f'{{"input": "{written}"}}'
    for size in (1, 2, 3, len(arguments)):
        inputs = Inputs(frozenset({"say"}))
        inputs.push([CallBegin(0, "say", "c")])
        parts = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        pieces = [p for part in parts for p in inputs.push([CallArguments(0, part)])]
        assert "".join(p.text for p in pieces if isinstance(p, CallArguments)) == meant


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"additionalProperties": False}}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(client, mode):
    tools = [function(name) for name in ("one", "two", "three")]
    some = [{"type": "function", "function": {"name": "two"}}]
    body = {"messages": [ASK], "tools": tools, "max_tokens": 100}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}
    answer = client.post(CHAT, json={**body, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    calls = answer.json()["choices"][0]["message"].get("tool_calls", [])
    assert {call["function"]["name"] for call in calls} == ({"two"} if mode == "required" else set())
    # It is told of all of them, so that a prompt begins as the one before it.
    assert prompt_of(client, messages=[ASK], tools=tools, tool_choice=choice).startswith("[one][two][three]")
    flat = [{"type": "function", "name": name, "parameters": {}} for name in ("one", "two")]
    named = [{"type": "function", "name": "two"}, {"type": "mcp", "server_label": "x"}]
    picked = {"type": "allowed_tools", "mode": mode, "tools": named}
    asked = {"input": "q", "tools": flat, "tool_choice": picked, "max_output_tokens": 20}
    answer = client.post(RESPONSES, json=asked)
    assert answer.status_code == 200, answer.text
    assert all(item.get("name", "two") == "two" for item in answer.json()["output"])
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "four"}}]
    assert "'four' is not among the tools" in refusal(client, CHAT, **body, tool_choice=choice)


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES, "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_raises_before_the_answer_is_read_aborts_the_request(
    server: Running, monkeypatch, route, stream
):
    """Whatever stands between the queue and the reader: the slot is free again at once."""
    body = {
        CHAT: {"messages": [ASK], "max_tokens": 200},
        MESSAGES: {"messages": [ASK], "max_tokens": 200},
        RESPONSES: {"input": "q", "max_output_tokens": 200},
        "/v1/completions": {"prompt": "q", "max_tokens": 200},
        "/generate": {"text": "q", "sampling_params": {"max_new_tokens": 200}},
    }[route]

    def wrong(*args: Any, **options: Any) -> Any:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Call, "respond", wrong)
    kept = server.allm.submit
    streams: list[Any] = []

    async def submit(*args: Any, **options: Any) -> Any:
        streams.append(await kept(*args, **options))
        return streams[-1]

    monkeypatch.setattr(server.allm, "submit", submit)
    with server.client() as client:
        assert client.post(route, json={**body, "stream": stream}).status_code == 500
    wait_until(lambda: server.allm.live == 0)
    (one,) = streams
    assert [c.finish_reason for c in one._unread[-1][1].outputs] == ["abort"]


def test_a_misspelt_field_names_the_nearest_where_it_is_refused(server: Running):
    strict = server.variant(strict=True)
    for name, meant in (("max_token", "max_tokens"), ("tool_choices", "tool_choice")):
        answer = strict.post(CHAT, json={"messages": [ASK], name: 1})
        assert answer.json()["error"]["message"] == f"unknown field {name}; do you mean {meant}?"
