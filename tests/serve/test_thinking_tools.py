"""Tools of a model that thinks: every route, choice and depth answers, ends, and finds what is written."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_core import to_json

from mtp_jax import OutputText, Tool, ToolUse
from mtp_jax import Tokenizer as TextTokenizer
from mtp_jax.text.tools.conversation import written
from mtp_jax.text.tools.formats import FORMATS as FORMATS_OF
from serve.answers import inputs
from serve.answers.reasoning import ThoughtTokens
from serve.answers.turn import Thought, Turn, called
from tests.serve.conftest import Running, Variant, simulated, start, weightless
from tests.serve.helpers import completion
from tests.text.tools.families import backend

FORMATS = ("glm45", "glm47", "kimi_k2", "gigachat3", "json")  # those in ASCII, which the tokenizer has
TAGS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|function_call|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip
VOCAB = 160


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A simulated model whose template opens a thought; tags of calls and thoughts are tokens of its own."""
    folder = weightless(tmp_path_factory.mktemp("thinking"), TAGS)
    # White space, which a grammar allows in many places, comes after all words.
    words = [*"abcdefgh5", '"', "}", "{", ":", ",", *TAGS[1:]]
    llm = simulated(folder, words, end_rate=0.05, simulated_step=0.0, max_model_len=1000)
    with start(llm, spec_metrics="none") as found:
        yield found


def tool(name: str, strict: bool) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "to": {"enum": ["a", "5"]}},
        "required": ["n", "to"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


CHOICES = {
    "auto": ("auto", False),
    "required": ("required", False),
    "named": ({"type": "function", "function": {"name": "go"}}, False),
    "strict": ("auto", True),
}
TURNS = [{"role": "user", "content": "q"}]


def chat(
    app: Variant, choice: str, depth: int, stream: bool, question: str = "q", **more: Any
) -> dict[str, Any]:
    """The assistant's message, its tokens and its end."""
    wanted, strict = CHOICES[choice]
    answer = app.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": question}],
            "tools": [tool("go", strict), tool("stay", strict)],
            "tool_choice": wanted,
            "parallel_tool_calls": False,  # this model would go on with calls
            "chat_template_kwargs": {"thinking": True},
            "temperature": 0,
            "return_token_ids": True,
            "speculative": {"max_tokens": depth},
            "stream": stream,
            **more,
        },
    )
    assert answer.status_code == 200, answer.text
    if not stream:
        (found,) = answer.json()["choices"]
        message = found["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = {"thought": message.get("reasoning", ""), "text": message["content"] or ""}
        return {**said, "calls": calls, "end": found["finish_reason"], "ids": found["token_ids"]}
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in events), events
    parts = [event["choices"][0] for event in events if event["choices"]]
    whole: dict[str, Any] = {
        "thought": "",
        "text": "",
        "calls": [],
        "end": parts[-1]["finish_reason"],
        "ids": [],
    }
    for part in parts:
        delta = part["delta"]
        whole["thought"] += delta.get("reasoning", "")
        whole["text"] += delta.get("content") or ""
        whole["ids"] += part.get("token_ids") or []
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(whole["calls"]):
                whole["calls"].append({"name": call["function"]["name"], "arguments": ""})
            whole["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return whole


def same(found: dict[str, Any]) -> dict[str, Any]:
    """Without white space around calls."""
    calls = [{**call, "arguments": json.loads(call["arguments"])} for call in found["calls"]]
    return {**found, "text": found["text"].strip() if calls else found["text"], "calls": calls}


# Every form of calls and every choice once; the other pairs are further cases.
PAIRS = [
    ("glm45", "auto"),
    ("glm47", "required"),
    ("kimi_k2", "named"),
    ("gigachat3", "strict"),
    ("json", "auto"),
]


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        (form, choice) if (form, choice) in PAIRS else pytest.param(form, choice, marks=pytest.mark.rest)
        for form, choice in itertools.product(FORMATS, CHOICES)
    ],
)
def test_chats_answer_and_end_at_every_depth(running, form, choice):
    app = running.variant(tool_parser=form)
    ends = []
    for question in "ae":
        plain = same(chat(app, choice, 0, False, question))
        assert same(chat(app, choice, 3, False, question)) == plain
        assert same(chat(app, choice, 3, True, question)) == plain
        assert plain["end"] == ("tool_calls" if plain["calls"] else "stop"), plain
        for call in plain["calls"] if choice != "auto" else ():
            assert call["name"] in (("go",) if choice == "named" else ("go", "stay"))
            assert call["arguments"].keys() == {"n", "to"}
        ends.append(plain["end"])
    assert set(ends) == {"tool_calls"} or choice in ("auto", "strict")
    assert "tool_calls" in ends


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", ["glm47", pytest.param("json", marks=pytest.mark.rest)])
def test_a_budget_of_thought_ends_no_call(running, form, choice):
    """A call that begins within the budget is written to its end."""
    app = running.variant(tool_parser=form)
    for question in "ae":
        plain = same(chat(app, choice, 0, False, question, max_thinking_tokens=4))
        assert same(chat(app, choice, 3, True, question, max_thinking_tokens=4)) == plain
        assert plain["end"] == ("tool_calls" if plain["calls"] else "stop"), plain
        assert len(plain["thought"]) <= 4  # one character per token
        assert plain["calls"] or choice in ("auto", "strict")


@pytest.mark.parametrize("choice", CHOICES)
def test_the_other_routes_say_the_same(running, choice):
    app = running.variant(tool_parser="glm47")
    wanted = same(chat(app, choice, 0, stream=False))
    kind, strict = CHOICES[choice]
    for stream in (False, True):
        tools = [{"type": "function", **tool(name, strict)["function"]} for name in ("go", "stay")]
        named = {"type": "function", "name": "go"} if choice == "named" else kind
        body = {"input": TURNS, "tools": tools, "tool_choice": named, "temperature": 0, "stream": stream}
        body["parallel_tool_calls"] = False
        answer = app.post("/v1/responses", json={**body, "reasoning": {"effort": "high"}})
        assert answer.status_code == 200, answer.text
        found = answer.json() if not stream else last_event(answer.text)["response"]
        assert found["status"] == "completed"
        assert responses_say(found["output"]) == {k: wanted[k] for k in ("thought", "calls")}
        tools = [{"name": t["name"], "input_schema": t["parameters"], "strict": strict} for t in tools]
        named = {"required": {"type": "any"}, "named": {"type": "tool", "name": "go"}}.get(
            choice, {"type": "auto"}
        )
        named |= {"disable_parallel_tool_use": True}
        body = {"model": "tiny", "max_tokens": 200, "messages": TURNS, "tools": tools, "tool_choice": named}
        body |= {"temperature": 0, "thinking": {"type": "enabled"}, "stream": stream}
        answer = app.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            content = answer.json()["content"]
            assert answer.json()["stop_reason"] in ("end_turn", "tool_use")
            assert messages_say(content) == {k: wanted[k] for k in ("thought", "calls")}
        else:
            assert last_event(answer.text)["type"] == "message_stop"


def last_event(text: str) -> dict[str, Any]:
    return json.loads([line[6:] for line in text.splitlines() if line.startswith("data: {")][-1])


def responses_say(items: list[dict[str, Any]]) -> dict[str, Any]:
    thought = "".join(part["text"] for i in items if i["type"] == "reasoning" for part in i["content"])
    calls = [i for i in items if i["type"] == "function_call"]
    return {
        "thought": thought,
        "calls": [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls],
    }


def messages_say(content: list[dict[str, Any]]) -> dict[str, Any]:
    thought = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    calls = [block for block in content if block["type"] == "tool_use"]
    return {"thought": thought, "calls": [{"name": c["name"], "arguments": c["input"]} for c in calls]}


# Turns, without a server


def pieces_of(form: str, thinking: bool, texts: list[str]) -> tuple[str, str, list[Any]]:
    """Thought, text and calls."""
    use = ToolUse.of(form, [Tool("f", {"properties": {"a": {"type": "integer"}}})])
    turn = Turn(thinking, True, use)
    pieces = [piece for text in texts[:-1] for piece in turn.push(completion(text))]
    pieces += turn.push(completion(texts[-1], "stop"))
    thought = "".join(p.text for p in pieces if isinstance(p, Thought))
    text = "".join(p.text for p in pieces if isinstance(p, OutputText))
    assert turn.finish_reason(completion("", "stop")) == ("tool_calls" if called(pieces) else "stop")
    return thought, text, [(call.name, json.loads(call.arguments)) for call in called(pieces)]


CALL = [("f", {"a": 5})]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("form", ToolUse.FORMATS)
def test_a_call_ends_a_thought(form, size):
    call = written(FORMATS_OF[form], [("f", '{"a": 5}')])
    for output, expected in (
        ("I look." + call, ("I look.", "", CALL)),
        ("I look.</think>" + call, ("I look.", "", CALL)),
        ("I look.</think>Yes. " + call, ("I look.", "Yes.", CALL)),
        ("I look." + call + "</think>Done.", ("I look.", "Done.", CALL)),
        ("I look." + call + " Done.", ("I look.", " Done.", CALL)),
        ("I look.</think>\n\n" + call + "\n", ("I look.", "", CALL)),
        ("I look.</think>Yes.\n \nNo. \n", ("I look.", "Yes.\n \nNo. \n", [])),
        ("Plain words only", ("Plain words only", "", [])),
        ("a </thin" + call, ("a </thin", "", CALL)),
    ):
        cut = [output[i : i + size] for i in range(0, len(output), size)]
        assert pieces_of(form, True, cut) == expected, output
    assert pieces_of(form, False, ["<think>x</think>" + call]) == ("x", "", CALL)
    assert pieces_of(form, False, ["<think>x" + call]) == ("x", "", CALL)


@pytest.mark.parametrize("form", ToolUse.FORMATS)
def test_tokens_of_a_thought_are_counted_up_to_a_call(form):
    use = ToolUse.of(form, [Tool("f")])
    tokenizer = TextTokenizer(backend(form, "tokens"), {}, {})
    head = FORMATS_OF[form].opens[0]
    ids = tokenizer.encode(f"I look.{head} more and more", add_special_tokens=False)
    counted = ThoughtTokens(tokenizer, use, thinking=True)
    counted.push(ids)
    assert counted.count == len(tokenizer.encode(f"I look.{head}", add_special_tokens=False)) < len(ids)


@pytest.mark.parametrize(
    ("text", "choice", "shown"),
    [
        ("\n\n", "required", ""),
        ("\n\n<", "required", ""),
        ("\n\n<", "auto", ""),
        ("\n\n<tool_call>\n{", "auto", ""),
        ("\n\n", "auto", "\n\n"),
        ("\nas x <", "auto", "\nas x"),
    ],
)
def test_the_beginning_of_a_call_that_a_limit_cuts_is_no_text(text, choice, shown):
    def said(reason: str) -> str:
        turn = Turn(False, False, ToolUse.of("json", [Tool("f")], choice))
        pieces = [piece for c in text[:-1] for piece in turn.push(completion(c, None))]
        pieces += turn.push(completion(text[-1], reason))
        return "".join(piece.text for piece in pieces if isinstance(piece, OutputText))

    assert said("length") == said("timeout") == shown
    assert choice == "required" or "tool" in text or said("stop") == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("5", None),
        ('"x"', None),
        ("[1]", None),
        ("null", None),
        ('{"a":' * 100_000, None),
        ('{"a": [1]}', {"a": [1]}),
    ],
)
def test_arguments_that_are_no_object_are_none(arguments, expected):
    assert inputs.arguments(arguments) == expected


@pytest.mark.parametrize("depth", [200, 300, 900, 3000])
def test_what_nests_too_deep_for_an_answer_is_left_out(depth):
    to_json(inputs.arguments('{"a":' * depth + "1" + "}" * depth))
