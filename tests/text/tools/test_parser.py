"""Calls of tools are found however a text is cut, and nothing of a text is lost."""

import json
import random

import pytest

from mtp_jax.text.tools.formats import FORMATS
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText, Part

B, S, E, C, X = (
    f"<\uff5ctool▁{t}\uff5c>" for t in ("calls▁begin", "sep", "call▁end", "call▁begin", "calls▁end")
)
D = "\uff5cDSML\uff5c"
ONE = {
    "deepseek_v3": f'{B}{C}function{S}f\n```json\n{{"a": "x<y", "n": 2}}\n```{E}{X}',
    "deepseek_v31": f'{B}{C}f{S}{{"a": "x<y", "n": 2}}{E}{X}',
    "deepseek_v32": f'<{D}function_calls>\n<{D}invoke name="f">\n'
    f'<{D}parameter name="a" string="true">x<y</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">2</{D}parameter>\n</{D}invoke>\n</{D}function_calls>',
    "glm47": "<tool_call>f\n<arg_key>a</arg_key><arg_value>x<y</arg_value>"
    "<arg_key>n</arg_key>\n<arg_value>2</arg_value></tool_call>",
    "json": '<tool_call>\n{"name": "f", "arguments": {"a": "x<y", "n": 2}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "x<y", "n": 2}<|tool_call_end|><|tool_calls_section_end|>',
}


def parse(name: str, pieces: list[str]) -> list[Part]:
    """All parts; neighbours of one kind are joined."""
    parser = ToolParser(FORMATS[name])
    joined: list[Part] = []
    for part in [p for piece in pieces for p in parser.push(piece)] + parser.flush():
        last = joined[-1] if joined else None
        if isinstance(part, OutputText) and isinstance(last, OutputText):
            joined[-1] = OutputText(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_between_texts(name):
    before, begin, arguments, end, after = parse(name, ["I look < it up." + ONE[name] + "Done <"])
    assert (before, after) == (OutputText("I look < it up."), OutputText("Done <"))
    assert begin == CallBegin(0, "f", "functions.f:0" if name == "kimi_k2" else None)
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"a": "x<y", "n": 2}
    assert end == CallEnd(0)


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_of_whole_broken_and_truncated_calls_gives_the_same(name):
    rng = random.Random(name)
    for _ in range(1000):
        text = "".join(rng.choice(["Hi <", " \n", ONE[name], ONE[name]]) for _ in range(rng.randint(1, 4)))
        change = rng.randrange(3)
        at = rng.randrange(len(text))
        if change == 1:
            text = text[:at]
        elif change == 2:
            text = text[:at] + text[at + rng.randint(1, 9) :]
        borders = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 12)))
        pieces = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
        assert parse(name, pieces) == parse(name, [text]) == parse(name, list(text)), (text, pieces)


def head_begins(name: str) -> int:
    """Characters of the example before its tool's name."""
    return ONE[name].index("f", len(FORMATS[name].block + FORMATS[name].call))


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_without_a_whole_head_is_text(name):
    for end in range(1, head_begins(name)):
        assert parse(name, list(ONE[name][:end])) == [OutputText(ONE[name][:end])]


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_head_loses_no_character(name):
    form = FORMATS[name]
    for text in (
        form.block + form.call,
        form.block + form.call + " ?" + form.head_ends[0] + " end",
        "a" + form.call * 2,
    ):
        assert parse(name, list(text)) == [OutputText(text)]


def test_two_calls_and_a_call_that_is_cut():
    second = ONE["deepseek_v31"].removeprefix(B)
    text = ONE["deepseek_v31"].removesuffix(X) + "\n" + second
    assert [p.index for p in parse("deepseek_v31", [text]) if isinstance(p, CallEnd)] == [0, 1]
    cut = parse("deepseek_v31", [text[: -len(E + X) - 3]])
    assert cut[-2:] == [CallBegin(1, "f"), CallArguments(1, '{"a": "x<y", "n":')]


def test_a_tools_schema_says_which_glm_parameters_are_text():
    text = "<tool_call>f<arg_key>zip</arg_key><arg_value>08</arg_value>"
    text += "<arg_key>n</arg_key><arg_value>10</arg_value></tool_call>"
    for strings, value in (({"f": ["n"]}, "10"), ({}, 10)):
        parts = ToolParser(FORMATS["glm47"], strings).push(text)
        arguments = "".join(p.text for p in parts if isinstance(p, CallArguments))
        assert json.loads(arguments) == {"zip": "08", "n": value}


def test_json_in_dsml_and_a_call_without_arguments():
    head = f'<{D}function_calls>\n<{D}invoke name="f">'
    tail = f"</{D}invoke>\n</{D}function_calls>"
    assert parse("deepseek_v32", [head + '{"a": 1}' + tail])[1] == CallArguments(0, '{"a": 1}')
    assert parse("deepseek_v32", [head + "\n" + tail])[1] == CallArguments(0, "{}")
    assert parse("glm47", ["<tool_call>f</tool_call>"]) == [
        CallBegin(0, "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
