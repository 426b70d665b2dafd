"""Whatever a grammar of calls lets through is a call that its parser finds, with arguments that fit."""

import functools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par_with_draft_tokens

from mtp_jax.errors import RequestError
from mtp_jax.text.tools.formats import FORMATS
from mtp_jax.text.tools.grammar import Required, call_grammar
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText, Part
from mtp_jax.text.tools.tool import Tool
from tests.text.tools.families import backend, compiled, vocabulary
from tests.text.tools.helpers import random_tool

# How a vocabulary has the tags of a format: families.backend.
AS_TOKENS = pytest.mark.parametrize(
    "as_tokens", ["special", *(pytest.param(kind, marks=pytest.mark.rest) for kind in ("text", "tokens"))]
)


class Writer:
    """Writes at random what a grammar allows, and ends as soon as it may."""

    def __init__(self, name: str, as_tokens: str) -> None:
        self.tokenizer = tokenizer = backend(name, as_tokens)
        self.size, self.inner = tokenizer.get_vocab_size(), compiled(name, as_tokens)
        texts = [tokenizer.decode([t], skip_special_tokens=False) for t in range(self.size)]
        self.weights = np.array([9.0 if text[:1] in tuple('"}<,:') else 1.0 for text in texts])

    def write(self, grammar: str, seed: int, start: str = "") -> str:
        matcher = LLMatcher(self.inner, grammar, log_level=0)
        assert not matcher.is_error(), (matcher.get_error(), grammar)
        ids = self.tokenizer.encode(start, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        rng = np.random.default_rng(seed)
        while not matcher.is_accepting():
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self.size])
            weights = self.weights[allowed]
            token = int(rng.choice(allowed, p=weights / weights.sum()))
            assert matcher.consume_token(token)
            ids.append(token)
            assert len(ids) < 3000
        return self.tokenizer.decode(ids, skip_special_tokens=False)


writer_of = functools.cache(Writer)


def arguments(parts: list[Part], index: int) -> Any:
    return json.loads("".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == index))


@AS_TOKENS
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_of_random_tools_fit_their_schemas(name, as_tokens):
    form, rng = FORMATS[name], random.Random(name)
    writer = writer_of(name, as_tokens)
    keys = set()
    for seed in range(12):
        tools = [random_tool(rng, "one"), random_tool(rng, "two")]
        grammar = call_grammar(form, tools, vocabulary(writer.tokenizer), Required(True, seed % 2 == 0))
        text = writer.write(grammar, seed)
        parser = ToolParser(form, {tool.name: tool.parameters for tool in tools})
        parts = parser.push(text) + parser.flush()
        begun = [part for part in parts if isinstance(part, CallBegin)]
        assert len(begun) == sum(isinstance(part, CallEnd) for part in parts) >= 1, text
        assert len(begun) == 1 or seed % 2 == 0
        assert not any(part.text.strip() for part in parts if isinstance(part, OutputText)), text
        for begin in begun:
            value = arguments(parts, begin.index)
            (tool,) = (tool for tool in tools if tool.name == begin.name)
            Draft202012Validator(tool.parameters).validate(value)
            keys |= value.keys()
    assert len(keys) >= 3


@AS_TOKENS
@pytest.mark.parametrize("name", FORMATS)
def test_text_may_hold_a_call_and_one_that_begins_is_completed(name, as_tokens):
    form = FORMATS[name]
    writer = writer_of(name, as_tokens)
    tool = Tool(
        "f",
        {"properties": {"n": {"const": 5}}, "required": ["n"], "additionalProperties": False},
        strict=True,
    )
    grammar = call_grammar(form, [tool], vocabulary(writer.tokenizer), Required(False, True))
    assert writer.write(grammar, 0) == ""  # text may end anywhere
    text = writer.write(grammar, 0, start="I see < here." + form.opens[0])
    said, begin, *rest = parts = ToolParser(form).push(text)
    assert said == OutputText("I see < here.")
    assert isinstance(begin, CallBegin)
    assert any(isinstance(part, CallEnd) for part in rest)
    assert arguments(parts, 0) == {"n": 5}


@AS_TOKENS
@pytest.mark.parametrize("name", FORMATS)
def test_masks_along_drafts_are_those_of_one_token_at_a_time(name, as_tokens):
    form, rng, width = FORMATS[name], random.Random(name), 4
    writer = writer_of(name, as_tokens)
    tools, words = [random_tool(rng, "f"), random_tool(rng, "two")], -(-writer.size // 32)
    grammar = call_grammar(form, tools, vocabulary(writer.tokenizer), Required(True, True))
    ids = writer.tokenizer.encode(writer.write(grammar, 0), add_special_tokens=False).ids[:60]
    one, many = (LLMatcher(writer.inner, grammar, log_level=0) for _ in range(2))
    expected = np.full((len(ids), words), -1, np.int32)
    for i, token in enumerate(ids):
        fill_next_token_bitmask(one, expected, i)
        one.consume_token(token)
    for i in range(len(ids) - width):
        masks = np.full((width, words), -1, np.int32)
        drafted = [(many, 0, ids[i : i + width - 1])]
        fill_next_token_bitmask_par_with_draft_tokens(LLExecutor(), drafted, masks)
        np.testing.assert_array_equal(masks, expected[i : i + width])
        many.consume_token(ids[i])


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_a_call_fits_its_schema(name):
    form, tool = FORMATS[name], Tool("f", {"additionalProperties": False}, strict=True)
    writer = writer_of(name, "text")
    asked = Required(False, False, answer={"const": [1]})
    grammar = call_grammar(form, [tool], vocabulary(writer.tokenizer), asked)
    assert json.loads(writer.write(grammar, 0, start="[")) == [1]
    (begin, *_) = ToolParser(form).push(writer.write(grammar, 0, start=form.opens[0][:3]))
    assert isinstance(begin, CallBegin)


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        ("glm47", "a</arg_key>b", r"cannot write a parameter named 'a</arg_key>b': it holds '</arg_key>'"),
        ("deepseek_v32", 'a" string="true', "cannot write a parameter named"),
        ("glm47", "{string}", ""),
        ("deepseek_v32", "{string}", ""),
        ("deepseek_v32", 'q"x', ""),
        ("deepseek_v32", "</\uff5cDSML\uff5cparameter>", ""),
        ("glm47", "</s><think>", ""),
        ("deepseek_v32", "<\uff5cend\u2581of\u2581sentence\uff5c>", ""),
        ("kimi_k2", "<|tool_call_end|>", ""),
    ],
)
def test_a_forced_call_has_the_argument_it_must_have_or_is_refused(name, key, says):
    form, writer = FORMATS[name], writer_of(name, "special")
    schema = {"properties": {key: {"const": "</s>"}}, "required": [key], "additionalProperties": False}
    if says:
        with pytest.raises(RequestError, match=says):
            call_grammar(form, [Tool("f", schema)], vocabulary(writer.tokenizer), Required(True, False))
        return
    grammar = call_grammar(form, [Tool("f", schema)], vocabulary(writer.tokenizer), Required(True, False))
    parts = ToolParser(form, {"f": schema}).push(writer.write(grammar, 0))
    assert arguments(parts, 0) == {key: "</s>"}


@pytest.mark.parametrize("name", ["glm47", "deepseek_v32"])
def test_what_arguments_each_by_itself_cannot_keep_to_is_refused(name):
    """Where it must be kept to, of a strict tool; a forced call of any other tool is held to the rest."""
    words = vocabulary(backend(name, "tokens"))
    many = [f"p{i}" for i in range(65)]
    stop = "</arg_value>" if name == "glm47" else "</\uff5cDSML\uff5cparameter>"
    for schema, says in (
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            "'f': parameters: oneOf cannot be enforced for",
        ),
        (
            {"properties": {key: {"type": "integer"} for key in many}, "required": many},
            "more than 64 parameters",
        ),
        (
            {"properties": {}, "required": ["a"], "additionalProperties": False},
            "required names 'a', of which no value",
        ),
        (
            {"properties": {"a": {"type": "string", "not": {"const": "b"}}}},
            "parameters.properties.a: not cannot be enforced",
        ),
        (
            {"properties": {"a": {"enum": ["b", f"c{stop}"]}}},
            "parameters.properties.a: this.*it holds",
        ),
    ):
        with pytest.raises(RequestError, match=says):
            call_grammar(FORMATS[name], [Tool("f", schema, strict=True)], words, Required(False, True))
        assert call_grammar(FORMATS[name], [Tool("f", schema)], words, Required(False, True))
        assert words.widened == []
        grammar = call_grammar(FORMATS[name], [Tool("f", schema)], words, Required(True, True))
        assert re.search(says, str(words.widened.pop()))
        assert not words.widened
        assert not LLMatcher.validate_grammar(grammar)
    with pytest.raises(RequestError, match="the tool 'a b': a name has letters"):
        call_grammar(FORMATS[name], [Tool("a b")], words, Required(False, True))
    optional = {"properties": {f"p{i}": {"type": "integer"} for i in range(100)}, "required": ["p99"]}
    assert call_grammar(FORMATS[name], [Tool("f", optional)], words, Required(True, True))


@pytest.mark.parametrize("as_tokens", ["special", "text"])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_grammar_lets_closing_tags_without_their_mark_end_a_call(name, as_tokens):
    """Else an output that slipped would stand in a value for ever."""
    form, mark = FORMATS[name], "\uff5cDSML\uff5c"
    writer = writer_of(name, as_tokens)
    block, end = form.blocks[0], form.block_ends[0]
    begin = f'{block}\n{form.call} name="f">\n<{mark}parameter name="a" string="true">x y'
    marked = f"</{mark}parameter>\n</{mark}invoke>\n{end}"
    number = f'</{mark}parameter>\n<{mark}parameter name="n" string="false">2'
    ends = [marked, marked.replace(mark, ""), marked.replace(f"</{mark}parameter", "</parameter")]
    ends += [marked.replace(f"/{mark}invoke", "/invoke"), marked.replace(end, end.replace(mark, ""))]
    grammar = call_grammar(form, [Tool("f")], vocabulary(writer.tokenizer), Required(False, True))
    for text in (begin + inner + ending for inner in ("", number) for ending in ends):
        matcher = LLMatcher(writer.inner, grammar, log_level=0)
        ids = writer.tokenizer.encode(text, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids), text
        assert matcher.is_accepting(), text
        parser = ToolParser(form)
        parts = parser.push(text) + parser.flush()
        assert isinstance(parts[-1], CallEnd), text
        assert arguments(parts, 0) == {"a": "x y"} | ({"n": 2} if number in text else {}), text


@pytest.mark.parametrize("as_tokens", ["special", pytest.param("text", marks=pytest.mark.rest)])
@pytest.mark.parametrize("forced", [False, True])
def test_a_schema_lets_closing_tags_without_their_mark_end_a_call(as_tokens, forced):
    """The same where arguments must fit a schema: all that are required must be there by then."""
    form, mark = FORMATS["deepseek_v4"], "\uff5cDSML\uff5c"
    writer = writer_of("deepseek_v4", as_tokens)
    text, strict = {"type": "string"}, not forced
    schema = {
        "properties": {"a": text, "b": {"type": "string", "minLength": 2}, "c": text},
        "required": ["a", "b"],
    }
    if strict:
        schema["additionalProperties"] = False
    asked = Required(forced, True)
    grammar = call_grammar(form, [Tool("f", schema, strict)], vocabulary(writer.tokenizer), asked)

    def accepts(*keys: str, value: str = "x y", slip: bool = True) -> bool:
        shown = [f'<{mark}parameter name="{key}" string="true">{value}' for key in keys]
        whole = f"</{mark}parameter>\n".join(shown) + (
            "</parameter>\n</invoke>" if slip else f"</{mark}parameter>\n</{mark}invoke>"
        )
        output = f'{form.blocks[0]}\n{form.call} name="f">\n{whole}\n{form.block_ends[0]}'
        ids = writer.tokenizer.encode(output, add_special_tokens=False).ids
        matcher = LLMatcher(writer.inner, grammar, log_level=0)
        found = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        if found:
            parser = ToolParser(form, {"f": schema})
            assert arguments(parser.push(output) + parser.flush(), 0) == dict.fromkeys(keys, value)
        return found

    for keys in (("a", "b"), ("b", "a"), ("a", "b", "c"), ("c", "b", "a"), ("a", "c", "b")):
        assert accepts(*keys), keys
        assert accepts(*keys, slip=False), keys
    for keys in (("a",), ("b",), ("a", "c"), ("c",), ("a", "a"), ("a", "b", "b")):
        assert not accepts(*keys), keys
        assert not accepts(*keys, slip=False), keys
    assert not accepts("a", "b", value="x")
    assert accepts("a", "b", "other") == accepts("a", "b", "other", slip=False) == forced
