"""Tools that a client runs: each reaches the model, and its call comes back as its client knows it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest

from mtp_jax import CallArguments, CallBegin
from serve.bodies.client_tools import ClientTools, Identity
from serve.bodies.messages import MessagesBody
from serve.bodies.response_tools import OWN
from serve.bodies.responses import ResponsesBody
from serve.bodies.tools import use_of
from serve.bodies.toolsets import TOOLSETS as TOOLSETS_HERE

SAID = sorted((Path(__file__).parent / "clients").glob("*.json"))
ROUTE = "/v1/responses"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": NO_ARGUMENTS, **more}


def custom(name: str) -> dict[str, Any]:
    return {"type": "custom", "name": name, "format": {"type": "text"}}


def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "", "tools": [*tools]}


def added(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "parameters": {
        "type": "object",
        "properties": {"query": {"enum": ["mail", "news"]}},
        "required": ["query"],
        "additionalProperties": False,
    },
}
USER = {"role": "user", "content": "q"}


def body(*items: dict[str, Any], **fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": [*items, USER], **fields})


def names(told: ResponsesBody) -> list[str]:
    """Names of the tools in the prompt."""
    return [tool.function.name for tool in told.conversation().functions]


def declared(value: Any, namespace: str = "") -> Iterator[Identity]:
    """All tools of a request that its client runs, wherever they stand."""
    if isinstance(value, list):
        for item in value:
            yield from declared(item, namespace)
    elif isinstance(value, dict):
        kind, schema = value.get("type"), value.get("parameters") or value.get("input_schema")
        if "name" in value and (schema or kind == "custom") and "call_id" not in value:
            yield Identity(kind or "function", value["name"], namespace)
        elif kind == "tool_search" and value.get("execution") == "client":
            yield Identity(kind, kind)
        else:
            inner = value.get("name", "") if kind == "namespace" else ""
            for key in ("tools", "input"):
                yield from declared(value.get(key), inner)


@pytest.mark.parametrize("file", SAID, ids=[file.stem for file in SAID])
def test_no_tool_of_a_client_disappears(file):
    """Requests of several releases stand side by side, since users have all of them."""
    said = json.loads(file.read_text())
    wanted = {*declared(said)}
    if "messages" in said:
        told = MessagesBody.model_validate(said).conversation()
        assert {tool.function.name for tool in told.functions} == {tool.name for tool in wanted}
        return
    found = ResponsesBody.model_validate(said)
    known = found.client_tools
    assert {known.identity(name) for name in names(found)} == wanted
    assert len(names(found)) == len(wanted) > 5
    assert all(known.name(known.identity(name)) == name for name in names(found))


@pytest.mark.parametrize(
    ("lists", "wanted"),
    [
        ([[function("a")], [function("b")]], ["a", "b"]),
        ([[], [space("functions", function("a"), custom("b"))]], ["a", "b"]),
        ([[space("x", function("a")), space("y", function("a"))]], ["x__a", "y__a"]),
        ([[function("a"), space("functions", function("a"))]], ["a", "functions__a"]),
        ([[space("functions", function("a"))], [function("a")]], ["a", "a_2"]),
        ([[function("x__a"), space("x", function("a"))]], ["x__a", "x__a_2"]),
        ([[space("x", function("a"), custom("a"))]], ["x__a", "x__a_2"]),
        ([[function("a")], [function("a", description="newer")]], ["a"]),
        ([[space("x", function("a"))], [space("x", function("a"), function("b"))]], ["x__a", "x__b"]),
        ([[space("x")], [space("")]], []),
        ([[space("", function("a"))]], ["a"]),
        ([[space("mcp__x__", function("a"))]], ["mcp__x__a"]),
        ([[space("mcp__x", function("mcp__x__a"))]], ["mcp__x__a"]),
        ([[space("my server/ü", function("a"))]], ["my_server__a"]),
        ([[space("s" * 200, function("a" * 100))]], ["s" * 26 + "__" + "a" * 100]),
        ([[space("s", function("a" * 128)), space("t", function("a" * 128))]], ["a" * 128, "a" * 126 + "_2"]),
        ([[SEARCH, SEARCH]], ["tool_search"]),
        ([[function("tool_search")], [SEARCH]], ["tool_search", "tool_search_2"]),
        ([[{"type": "tool_search", "execution": "client"}]], ["tool_search"]),
        ([[function("a", defer_loading=True)]], ["a"]),
        ([[{"type": kind} for kind in OWN]], [*dict.fromkeys(OWN.values())]),
        ([[{"type": "shell", "environment": {"type": "local"}}]], ["shell"]),
        ([[{"type": "of_next_year", "name": "a", "parameters": {}}]], ["a"]),
    ],
)  # fmt: skip
def test_names_in_the_prompt(lists, wanted):
    first, *items = lists
    told = body(*(added(*tools) for tools in items), tools=first)
    assert names(told) == wanted
    assert not list(told.unknown())
    # Each has one name, by which alone it is found again.
    assert [told.client_tools.name(told.client_tools.identity(name)) for name in wanted] == wanted


def test_too_many_tools_are_refused_before_each_has_a_name(client):
    """The names of all of these are alike, so that each would be compared with all before it."""
    tools = [space(chr(256 + i), function("a")) for i in range(4000)]
    refused = client.post(ROUTE, json={"input": [added(*tools), USER]})
    assert refused.status_code == 400
    assert "at most 256 are allowed together" in refused.json()["error"]["message"]
    same = [added(function("a"))] * 300
    assert names(body(*same)) == ["a"]


def test_the_newest_definition_holds():
    told = body(added(function("a", description="new")), tools=[function("a", description="old")])
    assert [tool.function.description for tool in told.conversation().functions] == ["new"]


def test_tools_of_a_server_are_left_out():
    ours = space("x", {"type": "web_search"}, function("a"))
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    told = body(
        added({"type": "image_generation"}),
        tools=[{"type": "mcp", "server_url": "u"}, ours, {"type": "tool_search"}, shell],
    )
    assert names(told) == ["x__a"]
    assert list(told.unknown()) == [
        "tools.0.mcp",
        "tools.1.tools.0.web_search",
        "tools.2.tool_search",
        "tools.3.shell",
        "input.0.tools.0.image_generation",
    ]


def test_strict_and_grammars_hold_inside_a_namespace():
    format = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = space("x", function("a", strict=True), {"type": "custom", "name": "b", "format": format})
    told = body(tools=[tools])
    first, second = told.conversation().functions
    assert first.function.strict is True
    assert "fits this grammar (regex):\na+" in (second.function.description or "")
    assert told.conversation().custom == {"x__b"}
    assert list(told.unknown()) == ["tools.0.tools.1.format"]


HISTORY = [
    {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"query": "mail"}},
    {
        "type": "tool_search_output",
        "call_id": "s",
        "execution": "client",
        "tools": [space("mail", function("list", defer_loading=True, description="Lists."), custom("say"))],
    },
    {"type": "function_call", "call_id": "a", "name": "list", "namespace": "mail", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "none"},
    {"type": "custom_tool_call", "call_id": "b", "name": "say", "namespace": "mail", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "said"},
    {"type": "function_call", "call_id": "c", "name": "gone", "namespace": "old", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "?"},
]


def test_a_history_names_tools_as_the_list_does():
    told = body(*HISTORY, tools=[SEARCH])
    assert names(told) == ["tool_search", "mail__list", "mail__say"]
    turns = told.conversation().turns()
    calls = [call["function"] for turn in turns for call in turn.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("tool_search", '{"query":"mail"}'),
        ("mail__list", "{}"),
        ("mail__say", '{"input": "x"}'),
        ("old__gone", "{}"),
    ]
    found = next(turn["content"] for turn in turns if turn["role"] == "tool")
    assert json.loads(found) == [{"name": "mail__list", "description": "Lists."}, {"name": "mail__say"}]
    assert not list(told.unknown())


def test_a_search_by_a_server_is_left_out_and_what_it_found_may_be_called():
    call = {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {}}
    found = {"type": "tool_search_output", "execution": "server", "call_id": None, "tools": [function("a")]}
    told = body(call, found)
    assert names(told) == ["a"]
    assert len(told.conversation().messages) == 1
    assert list(told.unknown()) == ["input.0.tool_search_call"]


@pytest.mark.parametrize(
    ("name", "namespace", "wanted"),
    [
        ("list", "mail", "mail__list"),
        ("list", "", "mail__list"),
        ("mail__list", "", "mail__list"),
        ("mail.list", "", "mail__list"),
        ("a", "functions", "a"),
        ("a", "", "a"),
        ("two", "", "two"),  # two tools have this name
        ("list", "news", "news__list"),
    ],
)
def test_a_tool_by_each_of_its_spellings(name, namespace, wanted):
    tools = [space("mail", function("list"), function("two")), space("x", function("two")), function("a")]
    known = body(tools=tools).client_tools
    assert known.name(Identity("function", name, namespace)) == wanted


@pytest.mark.parametrize("name", ["mail__list", "list", "mail.list"])
def test_a_model_may_write_a_name_without_its_namespace(name):
    told = body(tools=[space("mail", function("list")), function("a")])
    use = use_of("json", told.conversation().functions, None, None, told.client_tools.also)
    assert use
    parser = use.parser()
    parts = parser.push(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    assert parts[:2] == [CallBegin(0, "mail__list"), CallArguments(0, "{}")]
    assert told.client_tools.identity("mail__list") == Identity("function", "list", "mail")


def test_a_name_that_nobody_gave_is_a_function():
    assert ClientTools([]).identity("f") == Identity("function", "f")


def answer(client: httpx2.Client, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The item of the call that is forced, whole, and the events of its stream."""
    asked = {"input": [USER], "temperature": 0, "max_output_tokens": 120, **fields}
    whole = client.post(ROUTE, json=asked)
    assert whole.status_code == 200, whole.text
    assert "warning" not in whole.headers
    lines = client.post(ROUTE, json={**asked, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    (item,) = whole.json()["output"]
    return item, events


def items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The item in every event that has it: as it begins, as it ends, and at the end."""
    (begun,) = (e["item"] for e in events if e["type"] == "response.output_item.added")
    (ended,) = (e["item"] for e in events if e["type"] == "response.output_item.done")
    (last,) = events[-1]["response"]["output"]
    assert begun["id"] == ended["id"] == last["id"]
    assert ended == last
    return [begun, ended, last]


MAIL = space("mail", function("list"), custom("say"))


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "list", "namespace": "mail"},
        {"type": "function", "name": "list"},
        {"type": "function", "name": "mail__list"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "list", "namespace": "mail"}, {"type": "web_search"}],
        },
    ],
)
def test_a_call_of_a_tool_in_a_namespace(client, choice):
    fields = {"tools": [function("other"), MAIL], "tool_choice": choice, "parallel_tool_calls": False}
    item, events = answer(client, **fields)
    for found in (item, *items(events)):
        assert (found["type"], found["name"], found["namespace"]) == ("function_call", "list", "mail")
    assert json.loads(item["arguments"]) == {}
    (done,) = (e for e in events if e["type"] == "response.function_call_arguments.done")
    assert done["name"] == "list"
    assert events[-1]["response"]["tool_choice"] == choice


@pytest.mark.parametrize("namespace", ["mail", "functions"])
def test_a_call_of_a_custom_tool_in_a_namespace(client, namespace):
    tools = added(space(namespace, custom("say")))
    choice = {"type": "custom", "name": "say", "namespace": namespace}
    item, events = answer(client, input=[tools, USER], tool_choice=choice)
    for found in (item, *items(events)):
        assert (found["type"], found["name"], found["namespace"]) == ("custom_tool_call", "say", namespace)
    assert not item["input"].startswith("{")


def test_a_search_is_called(client):
    item, events = answer(client, tools=[SEARCH], tool_choice={"type": "tool_search"})
    begun, *ended = items(events)
    assert begun["arguments"] == {}
    for found in (item, *ended):
        assert (found["type"], found["execution"]) == ("tool_search_call", "client")
        assert found["arguments"] in ({"query": "mail"}, {"query": "news"})
        assert found["call_id"].startswith("call_")
    assert not [e for e in events if "arguments.delta" in e["type"]]


def test_a_shell_of_the_client_is_called(client):
    item, events = answer(
        client, tools=[{"type": "shell"}, MAIL], tool_choice={"type": "shell"}, max_output_tokens=150
    )
    for found in (item, *items(events)):
        assert found["type"] == "shell_call"
        assert found["call_id"]


@pytest.mark.parametrize("kind", ["computer", pytest.param("computer_use_preview", marks=pytest.mark.rest)])
def test_a_computer_of_the_client_is_called(client, kind):
    """Its screenshots cannot be read: a text stands in their place, and the call beside it."""
    size = {"display_width": 9, "display_height": 9, "environment": "browser"}
    tool = {"type": kind, **(size if kind == "computer_use_preview" else {})}
    item, events = answer(client, tools=[tool, MAIL], tool_choice={"type": kind}, max_output_tokens=150)
    for found in (item, *items(events)):
        assert (found["type"], found["pending_safety_checks"]) == ("computer_call", [])
    done = {"action": {"type": "wait"}, "status": "completed", "pending_safety_checks": []}
    call = {"type": "computer_call", "id": "cu_1", "call_id": "c", **done}
    shown = {"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    told = body(call, {"type": "computer_call_output", "call_id": "c", "output": shown}, tools=[tool])
    _, result, _ = turns = told.conversation().turns()
    (called,) = turns[0]["tool_calls"]
    assert (called["function"]["name"], called["function"]["arguments"]) == (
        "computer",
        '{"action":{"type":"wait"}}',
    )
    assert result["content"] == "[an image, which this model cannot read]"
    assert list(told.unknown()) == ["input.1.output.computer_screenshot"]


def test_a_namespace_is_described_where_its_first_tool_is():
    about = {"description": "Reads mail."}
    tools = [space("mail", function("list", description="Lists."), custom("say")) | about]
    told = body(
        tools=[*tools, space("x", function("a")) | {"description": "Has no more."}, space("y") | about]
    )
    described = [tool.function.description for tool in told.conversation().functions]
    assert described == ["All tools of mail: Reads mail.\n\nLists.", None, "All tools of x: Has no more."]


def test_all_tools_of_a_namespace_may_be_picked(client):
    tools = [function("other"), space("mail", function("list"), function("send"))]
    choice = {"type": "namespace", "name": "mail"}
    item, _ = answer(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert item["namespace"] == "mail"
    wrong = client.post(ROUTE, json={"input": [USER], "tools": tools, "tool_choice": {**choice, "name": "x"}})
    assert wrong.status_code == 400


def test_a_tool_that_is_not_there_cannot_be_picked(client):
    choice = {"type": "function", "name": "gone", "namespace": "mail"}
    wrong = client.post(ROUTE, json={"input": [USER], "tools": [MAIL], "tool_choice": choice})
    assert wrong.status_code == 400
    assert "'mail__gone' is not among the tools mail__list, mail__say" in wrong.json()["error"]["message"]


def test_an_answer_is_a_history(client):
    """The items of an answer, sent back, name the same tools."""
    fields = {"tools": [SEARCH, MAIL], "parallel_tool_calls": False}
    choices = [{"type": "tool_search"}, {"type": "function", "name": "list", "namespace": "mail"}]
    said: list[dict[str, Any]] = []
    for choice in choices:
        item, _ = answer(client, **fields, tool_choice=choice)
        said += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "r"}]
    told = body(*said, **fields)
    calls = [call for turn in told.conversation().turns() for call in turn.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["tool_search", "mail__list"]


def begun(client, **body: Any) -> dict[str, Any]:
    """The block with which the stream of a message begins; a limit may cut it."""
    answer = client.post("/v1/messages", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return next(event["content_block"] for event in events if "content_block" in event)


def message(*blocks: dict[str, Any], **fields: Any) -> MessagesBody:
    turns = [{"role": "user", "content": [*blocks, {"type": "text", "text": "q"}]}]
    return MessagesBody.model_validate({"messages": turns, "max_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("kind", "name", "argument"),
    [
        ("bash_20241022", "bash", "command"),
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250124", "str_replace_editor", "view_range"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_line"),
        ("memory_20250818", "memory", "old_path"),
        ("computer_20251124", "computer", "coordinate"),
    ],
)
def test_a_client_runs_versions_of_anthropics_tools(client, kind, name, argument):
    tools = [{"type": kind, "name": name, "max_characters": 9}]
    (tool,) = message(tools=tools).conversation().functions
    assert tool.function.name == name
    assert argument in (tool.function.parameters or {})["properties"]
    asked = {"messages": [USER], "tools": tools, "max_tokens": 100, "temperature": 0}
    block = begun(client, **asked, tool_choice={"type": "tool", "name": name})
    assert (block["type"], block["name"]) == ("tool_use", name)


def test_anthropics_servers_run_the_others():
    kinds = ("web_search_20260318", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset")
    kinds = (*kinds, "tool_search_tool_regex_20251119", "advisor_20260301")
    told = message(tools=[{"type": kind, "name": "x"} for kind in kinds])
    assert not told.conversation().functions
    assert list(told.unknown()) == [f"tools.{i}.{kind}" for i, kind in enumerate(kinds)]
    given = message(tools=[{"type": "of_next_year", "name": "x", "input_schema": NO_ARGUMENTS}])
    assert [tool.function.name for tool in given.conversation().functions] == ["x"]


TOOLSETS = ("computer_toolset_20260801", "browser_toolset_20260801")


def test_a_toolset_stands_for_tools_that_the_client_runs(client):
    """A call of a tool in it comes back as the tool's own name, and names the toolset."""
    configs = {"zoom": {"enabled": False}, "wait": {"enabled": True, "defer_loading": False}, "key": None}
    tools: list[dict[str, Any]] = [{"type": kind} for kind in TOOLSETS]
    told = message(tools=[{"type": TOOLSETS[0], "configs": configs}, tools[1]])
    names = [tool.function.name for tool in told.conversation().functions]
    assert len(names) == len({*names}) == 16 + 31
    assert {"computer__wait", "browser__zoom"} < {*names}
    assert not list(told.unknown())
    for tool, (_, members) in zip(tools, TOOLSETS_HERE.values(), strict=True):
        tool["configs"] = {name: {"enabled": name in ("new_tab", "wait")} for name in members}
    asked = {"messages": [USER], "tools": tools, "max_tokens": 60, "temperature": 0}
    called = {"type": "tool", "disable_parallel_tool_use": True}
    for name, toolset in (("new_tab", "browser"), ("computer", "computer")):
        block = begun(client, **asked, tool_choice={**called, "name": name})
        assert (block["type"], block["toolset_name"]) == ("tool_use", toolset)
        assert f"{toolset}__{block['name']}" in names
    history = {"type": "tool_use", "id": "a", "name": "new_tab", "toolset_name": "browser", "input": {}}
    state = {"type": "browser_state", "tabs": [{"tab_id": "7", "active": True}]}
    result = {"type": "tool_result", "tool_use_id": "a", "toolset_name": "browser", "content": [state]}
    turns = [USER, {"role": "assistant", "content": [history]}, {"role": "user", "content": [result]}]
    told = MessagesBody.model_validate({**asked, "messages": turns})
    _, call, found = told.conversation().turns()
    assert call["tool_calls"][0]["function"]["name"] == "browser__new_tab"
    assert json.loads(found["content"]) == {"tabs": [{"tab_id": "7", "active": True}]}
    assert not list(told.unknown())
    wrong = client.post(
        "/v1/messages", json={**asked, "tools": [{"type": TOOLSETS[0], "configs": {"x": {}}}]}
    )
    assert wrong.status_code == 400
    assert "'x' is none of its tools key, hold_key" in wrong.json()["error"]["message"]


@pytest.mark.rest
def test_a_toolset_has_the_tools_of_anthropics_package():
    from anthropic.types.beta.beta_browser_tool_use_block import BetaBrowserToolUseBlock
    from anthropic.types.beta.beta_computer_tool_use_block import BetaComputerToolUseBlock

    blocks = {"computer": BetaComputerToolUseBlock, "browser": BetaBrowserToolUseBlock}
    for kind in TOOLSETS:
        toolset = TOOLSETS_HERE[kind.rpartition("_")[0]]
        (union,) = (u for u in get_args(blocks[toolset[0]]) if get_args(u))
        theirs = {
            get_args(block.model_fields["name"].annotation)[0]: block.model_fields["input"].annotation
            for block in get_args(union)
        }
        for name, (about, schema) in toolset[1].items():
            fields = theirs.pop(name).model_fields
            assert about.endswith(".")
            assert {*schema["properties"]} == {field.alias or key for key, field in fields.items()}, name
            needed = {field.alias or key for key, field in fields.items() if field.is_required()}
            assert {*schema["required"]} == needed, name
        assert not theirs


def test_a_function_in_openais_shape_is_no_tool_of_messages(client):
    for tool in ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}):
        wrong = client.post("/v1/messages", json={"messages": [USER], "max_tokens": 2, "tools": [tool]})
        assert wrong.status_code == 400
        assert "tools.0." in wrong.json()["error"]["message"]


def test_a_name_that_two_tools_have_is_refused(client):
    tools = [{"name": "a", "input_schema": {}}] * 2
    wrong = client.post("/v1/messages", json={"messages": [USER], "max_tokens": 2, "tools": tools})
    assert "the name 'a' is there twice" in wrong.json()["error"]["message"]


def change(kind: str, name: str, **definition: Any) -> dict[str, Any]:
    tool: dict[str, Any] = {"type": "tool_reference", "name": name}
    if definition:
        tool = {"type": "tool_definition", "definition": {"name": name, **definition}}
    return {"type": f"tool_{kind}", "tool": tool}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([change("addition", "a")], ["a", "b"]),
        ([change("addition", "c", input_schema={})], ["a", "b", "c"]),
        ([change("addition", "c", input_schema={}), change("addition", "c")], ["a", "b", "c"]),
        ([change("removal", "a")], ["b"]),
        ([change("removal", "a"), change("addition", "a")], ["a", "b"]),
        ([change("addition", "c", input_schema={}), change("removal", "c")], ["a", "b"]),
        ([change("addition", "a", input_schema={}, description="new")], ["b", "a"]),
        ([change("addition", "bash", type="bash_20250124")], ["a", "b", "bash"]),
        ([change("addition", "x", type="web_search_20260318")], ["a", "b"]),
        ([change("addition", "", type=TOOLSETS[0]), change("removal", "computer")], ["a", "b"]),
    ],
)
def test_messages_may_change_the_tools(changes, wanted):
    told = message(*changes, tools=[{"name": name, "input_schema": {}} for name in "ab"])
    assert [tool.function.name for tool in told.conversation().functions] == wanted
    assert [turn["content"] for turn in told.conversation().turns()] == ["q"]
