"""Outputs as models write them: each says what it should, however it is cut, and a grammar takes it."""

import functools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from mtp_jax import OutputText, Tool, ToolUse
from mtp_jax.text.tools.grammar import Required, call_grammar
from serve.answers.turn import Thought, Turn, called
from tests.serve.helpers import completion
from tests.text.tools import families
from tests.text.tools.families import backend, compiled, vocabulary

CASES: list[dict[str, Any]] = tomllib.loads(
    Path(families.__file__).with_name("outputs.toml").read_text(encoding="utf-8")
)["case"]
# V4 has another block, in which the same goes wrong.
CASES += [
    {**case, "format": "deepseek_v4", "output": case["output"].replace("function_ca", "tool_ca")}
    for case in CASES
    if case["format"] == "deepseek_v32"
]
SOME = {"properties": {"a": {}}}
each = pytest.mark.parametrize("case", CASES, ids=[f"{c['format']}: {c['what']}" for c in CASES])


@functools.cache
def begun(name: str, as_tokens: str, grammar: str) -> LLMatcher:
    """The matcher of a grammar before any text."""
    return LLMatcher(compiled(name, as_tokens), grammar, log_level=0)


def use_of(case: dict[str, Any]) -> ToolUse:
    parameters = json.loads(case["parameters"]) if "parameters" in case else SOME
    found = ToolUse.of(case["format"], [Tool("f", parameters), Tool("g")])
    assert found is not None
    return found


@each
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_it_says_what_it_should(case, size):
    output, turn = case["output"], Turn(case.get("thinking", False), True, use_of(case))
    pieces = [
        piece for i in range(0, len(output), size) for piece in turn.push(completion(output[i : i + size]))
    ]
    pieces += turn.push(completion("", "stop" if case.get("whole", True) else "length"))
    assert "".join(p.text for p in pieces if isinstance(p, Thought)) == case.get("thought", "")
    text = "".join(p.text for p in pieces if isinstance(p, OutputText))
    assert text == case.get("text", "")
    calls = [(c.name, c.arguments) for c in called(pieces)]
    for (name, arguments), (expected, value) in zip(calls, json.loads(case["calls"]), strict=True):
        assert name == expected
        assert (arguments if isinstance(value, str) else json.loads(arguments)) == value


@each
@pytest.mark.parametrize(
    "as_tokens", ["tokens", *(pytest.param(kind, marks=pytest.mark.rest) for kind in ("special", "text"))]
)
def test_a_grammar_takes_it(case, as_tokens):
    name, use = case["format"], use_of(case)
    tokens = backend(name, as_tokens)
    asked = Required(forced=False, several=True, thinking=case.get("thinking", False))
    grammar = call_grammar(use.form, use.tools, vocabulary(tokens), asked)
    matcher = begun(name, as_tokens, grammar).deep_copy()
    ids = tokens.encode(case["output"], add_special_tokens=False).ids
    count = matcher.try_consume_tokens(ids)
    left = tokens.decode(ids[count:], skip_special_tokens=False)
    assert (left == "") == case.get("taken", True), left
    if case.get("taken", True) and case.get("whole", True):
        assert matcher.is_accepting()
