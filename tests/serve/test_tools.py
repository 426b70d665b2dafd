"""Tools, through the official `openai` package: forced calls are valid, with drafts as without."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.conftest import Running

ASK: Any = [{"role": "user", "content": "q"}]
PLAIN: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 100}


def tool(name: str, *, strict: bool = False, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [
    tool("go", to={"enum": ["here", "there"]}),
    tool("add", n={"type": "integer", "maximum": 9, "minimum": 0}),
]


@pytest.fixture(scope="module")
def api(server: Running):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def valid(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "go":
        return arguments in ({"to": "here"}, {"to": "there"})
    return call.function.name == "add" and arguments["n"] in range(10)


@pytest.mark.parametrize("choice", ["required", "go", "add"])
def test_a_forced_call_is_valid_and_its_tokens_are_those_without_drafts(api, choice):
    wanted = choice if choice == "required" else named(choice)

    def ask(depth: int | None) -> Any:
        extra = {"return_token_ids": True, "return_token_origins": True, "speculative": {"max_tokens": depth}}
        return api.chat.completions.create(
            messages=ASK,
            tools=TOOLS,
            tool_choice=wanted,
            parallel_tool_calls=False,
            extra_body=extra,
            **PLAIN,
        ).choices[0]

    answer, plain = ask(None), ask(0)
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert valid(call)
    assert call.id.startswith("call_")
    assert choice in ("required", call.function.name)
    assert answer.token_ids == plain.token_ids
    assert any(token["drafted"] for token in answer.token_origins)
    assert not any(token["drafted"] for token in plain.token_origins)


def test_a_streamed_call_is_the_whole_ones(api):
    ask: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": named("go"), **PLAIN}
    (whole,) = api.chat.completions.create(**ask).choices[0].message.tool_calls
    deltas = [c.choices[0] for c in api.chat.completions.create(stream=True, **ask) if c.choices]
    calls = [call for d in deltas for call in d.delta.tool_calls or ()]
    assert [(c.id is not None, c.function.name, c.type) for c in calls if c.function.name] == [
        (True, "go", "function")
    ]
    assert len(calls) > 2  # arguments come piece by piece
    assert "".join(c.function.arguments for c in calls).strip() == whole.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(d.delta.content for d in deltas)


def test_auto_lets_the_model_write_text_and_none_hides_the_tools(api, server):
    def ask(**options: Any) -> Any:
        return api.chat.completions.create(messages=ASK, **options, **PLAIN)

    auto, none, without = ask(tools=TOOLS), ask(tools=TOOLS, tool_choice="none"), ask()
    assert auto.choices[0].message.content
    assert none.choices[0].message.content == without.choices[0].message.content
    assert none.usage.prompt_tokens == without.usage.prompt_tokens < auto.usage.prompt_tokens


def test_without_a_call_the_answer_is_what_the_response_format_says(api):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    strict = tool("go", strict=True, to={"enum": ["here", "there"]})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = api.chat.completions.create(messages=ASK, tools=[strict], response_format=form, **PLAIN).choices[
        0
    ]
    if answer.message.tool_calls:
        assert valid(answer.message.tool_calls[0])
    else:
        assert json.loads(answer.message.content) == {}


def test_results_of_tools_reach_the_prompt(api, server):
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": '{"to": "here"}'}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
    with server.client() as client:
        ids = client.post("/tokenize", json={"messages": turns}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '"name": "go", "arguments": {"to": "here"}' in text
    assert "<tool_response>\ndone\n</tool_response>" in text
    assert api.chat.completions.create(messages=turns, tools=TOOLS, **PLAIN).choices


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": TOOLS, "tool_choice": named("stop")}, "'stop' is not among the tools go, add"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'go' is there twice"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "only JSON"),
    ],
)
def test_wrong_requests(server, body, says):
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
