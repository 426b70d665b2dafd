"""What a family's template writes of a call is taken by its grammar and read back, however it is cut."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from mtp_jax.text.tools.conversation import written
from mtp_jax.text.tools.formats import FORMATS
from mtp_jax.text.tools.grammar import Required, call_grammar
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText
from mtp_jax.text.tools.tool import Tool
from tests.text.tools.families import TEMPLATES, backend, compiled, joined, rendered, vocabulary

Draw = Callable[[random.Random], Any]
TEXTS = [
    "20240501", "Oslo", "null", "true", "[1, 2]", '{"a": 1}', "2", "-0.5", 'say "hi"', "a\nb\\n", "x < y > z",
    "\u00e9\u2713", "<b>bold</b>", "", " padded ", "</div>", "12 apples", "nullable",
]  # fmt: skip
WORDS = [text for text in TEXTS if text]


def one(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


STRING = {"type": "string"}
DEFINITIONS = {
    "Id": STRING,
    "Size": {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]},
    "Kind": {"enum": ["big", "small"]},
}
KINDS: list[tuple[Any, Draw]] = [
    (STRING, one(*TEXTS)),
    ({**STRING, "description": "d", "default": "x", "examples": ["y"], "deprecated": True}, one(*TEXTS)),
    ({"type": "string", "minLength": 1}, one(*WORDS)),
    ({"type": "string", "maxLength": 40}, one(*TEXTS)),
    ({"type": "string", "pattern": "^[0-9A-Za-z-]+$"}, one("20240501", "a-b", "null")),
    ({"type": "string", "pattern": "[0-9]/x"}, one("1/x", "a 2/x b")),
    ({"type": "string", "format": "date"}, one("2024-02-29", "1999-12-31")),
    ({"type": "string", "format": "date-time"}, one("2024-05-01T10:00:00Z", "2024-05-01T10:00:00.25+02:00")),
    ({"type": "string", "format": "email"}, one("a.b@example.org")),
    ({"type": "string", "format": "uuid"}, one("123e4567-e89b-12d3-a456-426614174000")),
    ({"type": "string", "format": "ipv4"}, one("10.0.0.255")),
    ({"type": "string", "format": "uri"}, one("https://example.org/a?b=c#d")),
    ({"type": ["string", "null"]}, one(*(t for t in TEXTS if t != "null"), None)),
    ({"anyOf": [STRING, {"type": "null"}]}, one(*(t for t in TEXTS if t != "null"), None)),
    ({"type": "string", "nullable": True}, one("20240501", "nul", None)),
    ({"$ref": "#/$defs/Id"}, one(*TEXTS)),
    ({"allOf": [{"$ref": "#/$defs/Id"}], "description": "d"}, one(*TEXTS)),
    ({"enum": ["20240501", None]}, one("20240501", None)),
    ({"type": "string", "enum": ["north", 'a "b"', "5"]}, one("north", 'a "b"', "5")),
    ({"const": "fixed"}, one("fixed")),
    ({"$ref": "#/$defs/Kind"}, one("big", "small")),
    ({"enum": [1, 2, 30]}, one(1, 2, 30)),
    ({"type": "integer", "minimum": 0, "maximum": 99}, one(0, 7, 99)),
    ({"type": "integer", "nullable": True}, one(3, None)),
    ({"type": "number"}, one(0.5, -2, 1e21)),
    ({"type": "boolean"}, one(True, False)),
    ({"type": "null"}, one(None)),
    ({"type": "array", "items": {"type": "integer"}}, one([], [1, 2], [3])),
    ({"type": "array", "items": STRING, "maxItems": 3}, one([], ["a", "</x>"], ["null"])),
    ({"type": "object", "properties": {"a": STRING}}, one({}, {"a": "b {"}, {"a": "b", "c": [1]})),
    ({"$ref": "#/$defs/Size"}, one({"w": 1}, {"w": 22})),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-z]+$"}]}, one(5, "abc", "null")),
    ({"oneOf": [{"type": "boolean"}, {"type": "array", "items": {}}]}, one(True, [1, "a"])),
    ({}, one("Oslo", 5, None, [1], {"a": None}, "12 apples", "x < y")),
]  # fmt: skip


def random_tool(rng: random.Random, name: str, strict: bool) -> tuple[Tool, dict[str, Draw]]:
    chosen = {f"{'abcdef'[i]}_{i}": k for i, k in enumerate(rng.sample(KINDS, rng.randrange(5)))}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {k: s for k, (s, _) in chosen.items()},
        "$defs": DEFINITIONS,
    }
    if strict:
        schema |= {"required": [*chosen], "additionalProperties": False}
    else:
        schema |= {"required": rng.sample([*chosen], len(chosen) // 2)}
    return Tool(name, schema, strict), {key: draw for key, (_, draw) in chosen.items()}


def random_call(rng: random.Random, tool: Tool, draws: dict[str, Draw]) -> dict[str, Any]:
    keys = [key for key in draws if key in tool.parameters["required"] or rng.random() < 0.5]
    if not tool.strict and rng.random() < 0.3:
        keys.append("unlisted")
    rng.shuffle(keys)
    unlisted = one("a word", 7, [None])
    return {key: draws.get(key, unlisted)(rng) for key in keys}


def cut(rng: random.Random, text: str) -> list[str]:
    borders = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rest), "forced", "strict"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_taken_and_read_back(name, mode):
    form, rng = FORMATS[name], random.Random(name + mode)
    for round in range(14):
        as_tokens = ("tokens", "special", "text")[round % 3]
        tools = [random_tool(rng, f, mode == "strict") for f in ("get_it", "get")]
        asked = Required(forced=mode == "forced", several=True)
        grammar = call_grammar(form, [tool for tool, _ in tools], vocabulary(backend(name, as_tokens)), asked)
        begin = LLMatcher(compiled(name, as_tokens), grammar, log_level=0)
        assert not begin.is_error(), begin.get_error()
        for _ in range(5):
            calls = [
                (tool.name, random_call(rng, tool, draws))
                for tool, draws in rng.choices(tools, k=rng.choice([1, 1, 2]))
            ]
            text = rendered(name, [(f, json.dumps(a, ensure_ascii=False)) for f, a in calls])
            ids = backend(name, as_tokens).encode(text, add_special_tokens=False).ids
            matcher = begin.deep_copy()
            count = matcher.try_consume_tokens(ids)
            rest = backend(name, as_tokens).decode(ids[count:], skip_special_tokens=False)
            assert (count, matcher.is_accepting()) == (len(ids), True), (text, f"but for: {rest}", grammar)
            assert written(form, [(f, json.dumps(a, ensure_ascii=False)) for f, a in calls]) == text.strip(
                "\n"
            )
            parser = ToolParser(form, {tool.name: tool.parameters for tool, _ in tools})
            parts = joined([p for piece in cut(rng, text) for p in parser.push(piece)] + parser.flush())
            assert [p.name for p in parts if isinstance(p, CallBegin)] == [f for f, _ in calls]
            assert [json.loads(p.text) for p in parts if isinstance(p, CallArguments)] == [
                a for _, a in calls
            ], text
            assert sum(isinstance(p, CallEnd) for p in parts) == len(calls)
            assert not any(p.text.strip() for p in parts if isinstance(p, OutputText))
