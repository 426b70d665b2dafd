"""Tools, through the official `openai` package: forced calls are valid, with drafts as without."""

import json
import threading
from typing import Any

import pytest

from mtp_jax.text import grammar
from tests.serve.helpers import ASK, PLAIN, body_of


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
    assert all(d.delta.model_dump(exclude_none=True) for d in deltas[:-1])  # tags make no event


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


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("json", "/v1/chat/completions"),
        ("glm47", "/v1/responses"),
        ("deepseek_v32", "/v1/messages"),
    ],
)
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"enum": 5}}}, "enum = 5; JSON Schema expects a list"),
        ({"properties": {"a": {"enum": None}}}, "enum = None"),
        ({"properties": {"a": 7}}, "7 is no JSON Schema"),
        ({"properties": []}, "properties = []"),
        ({"required": 5}, "required = 5; JSON Schema expects a list of strings"),
        ({"required": None}, "required = None"),
        ({"properties": {"a": {"type": 3}}}, "type = 3"),
        ({"properties": {"a": {"anyOf": {}}}}, "anyOf = {}"),
    ],
)
def test_what_is_no_schema_is_refused(server, form, path, schema, says):
    variant = server.variant(tool_parser=form)
    for forced in (False, True):
        answer = variant.post(path, json=body_of(path, {"name": "f", "parameters": schema}, forced))
        assert answer.status_code == 400, answer.text
        assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", ["json", "glm47", "deepseek_v32"])
def test_numbers_and_nesting_without_measure_are_an_answer_or_a_refusal(server, form):
    variant, path = server.variant(tool_parser=form), "/v1/chat/completions"
    deep: Any = {"type": "string"}
    for _ in range(60):
        deep = {"anyOf": [deep, {"type": "null"}]}
    loop = {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}
    for schema in (
        {"properties": {"a": {"minimum": 10**400}}},
        {"properties": {"a": {"enum": [10**400]}}},
        {"properties": {"a": {"type": "string", "maxLength": 10**400}}},
        {"properties": {"a": deep}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": loop},
        {"properties": {"a": {"anyOf": [{"enum": 5}]}}},
        {"properties": {"a": {"type": "string", "pattern": "("}}},
    ):
        for strict in (False, True):
            tool = {"name": "f", "parameters": schema, "strict": strict}
            answer = variant.post(path, json=body_of(path, tool, forced=False))
            assert answer.status_code in ((200, 400) if strict else (200,)), (schema, answer.text)


def test_grammars_of_tools_are_made_beside_the_event_loop(server, monkeypatch):
    """And of no more than their limit, whatever the tools are."""
    threads, embedded = set(), []

    def watched(schema: Any) -> str:
        threads.add(threading.current_thread().name)
        embedded.append(len(json.dumps(schema)))
        return grammar.embedded(schema)

    monkeypatch.setattr("mtp_jax.text.tools.use.embedded", watched)
    properties = {f"p{i}": {"type": "integer"} for i in range(60)}
    definitions = {f"d{i}": {"type": "object", "properties": properties} for i in range(90)}
    for count, status in ((40, 200), (3000, 400)):
        known = {f"n{i}": {"type": "integer"} for i in range(count)}
        schema = {"type": "object", "properties": known, "$defs": definitions, "additionalProperties": False}
        tool = {"name": "f", "parameters": schema, "strict": True}
        variant = server.variant(tool_parser="glm47")
        embedded.clear()
        answer = variant.post(
            "/v1/chat/completions", json=body_of("/v1/chat/completions", tool, forced=False)
        )
        assert answer.status_code == status, answer.text
        assert sum(embedded) < 100  # one integer, without definitions that no parameter names
    known = {f"n{i}": {"$ref": f"#/$defs/d{i}"} for i in range(90)}
    tool["parameters"] = schema | {"properties": known}
    answer = variant.post("/v1/chat/completions", json=body_of("/v1/chat/completions", tool, forced=False))
    assert (answer.status_code, sum(embedded) < 2**17) == (400, True)
    assert "more than 65536 characters" in answer.json()["error"]["message"]
    assert all(name.startswith("grammar") for name in threads), threads


def test_text_that_spells_a_special_token_is_text(client):
    """Keys and values of a schema may look like tokens of the model: ``<bos>`` and ``<eos>`` are two."""
    schema = {
        "type": "object",
        "properties": {"<eos>": {"enum": ["x<bos>y"]}, "b": {"const": "<eos>"}},
        "required": ["<eos>", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for more in ({"response_format": form}, {"structured_outputs": {"choice": ["a<bos><eos>b"]}}):
        answer = client.post(
            "/v1/chat/completions", json={"messages": ASK, "max_tokens": 220, "temperature": 0, **more}
        )
        assert answer.status_code == 200, answer.text
        content = answer.json()["choices"][0]["message"]["content"]
        assert content == "a<bos><eos>b" or json.loads(content) == {"<eos>": "x<bos>y", "b": "<eos>"}
