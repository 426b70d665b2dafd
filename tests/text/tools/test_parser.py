"""Calls of tools are found however a text is cut, and nothing of a text is lost."""

import json
import random

import pytest

from mtp_jax.text.tools.conversation import written
from mtp_jax.text.tools.formats import FORMATS
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText, Part
from mtp_jax.text.tools.values import KINDS, fits, kinds

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
    "deepseek_v4": f'<{D}tool_calls>\n<{D}invoke name="f">\n'
    f'<{D}parameter name="a" string="true">x<y</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">2</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>',
    "gigachat3": '<|function_call|>{"name": "f", "arguments": {"a": "x<y", "n": 2}}',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x<y</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
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


@pytest.mark.parametrize(
    "name",  # V4 has the form of V3.2 with a word of its own
    [pytest.param(name, marks=pytest.mark.rest) if name == "deepseek_v4" else name for name in FORMATS],
)
def test_any_cut_of_whole_broken_and_truncated_calls_gives_the_same(name):
    rng = random.Random(name)
    for _ in range(300):
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_shows_no_markup(name):
    """At any character: what is sure to be a tag, a head or a key is shown to nobody."""
    text = "Hi " + ONE[name]
    for end in range(3, len(text)):
        parts = parse(name, list(text[:end]))
        assert parts[0] == OutputText(text[:end] if end - 3 < signs(ONE[name]) else "Hi "), text[:end]
        assert not any(isinstance(part, OutputText) for part in parts[1:])


def signs(text: str) -> int:
    """How many characters a tag begins with that may be text."""
    return next(i for i, character in enumerate(text) if character.isalnum()) + 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_head_loses_no_character(name):
    form = FORMATS[name]
    for text in (form.opens[0] + form.call + " ? end", "a" + form.call * 2 + "?", form.opens[0] + "? <"):
        assert parse(name, list(text)) == [OutputText(text)]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.blocks])
def test_a_call_without_its_block(name):
    form = FORMATS[name]
    bare = ONE[name].replace(form.blocks[0], "").replace(form.block_ends[0], "")
    before, begin, arguments, _, after = parse(name, list("Ok. " + bare + " Done"))
    assert isinstance(before, OutputText)
    assert isinstance(begin, CallBegin)
    assert isinstance(arguments, CallArguments)
    assert isinstance(after, OutputText)
    assert (before.text.strip(), begin.name, after.text.strip()) == ("Ok.", "f", "Done")
    assert json.loads(arguments.text) == {"a": "x<y", "n": 2}
    for block, block_end in zip(form.blocks, form.block_ends, strict=True):
        other = ONE[name].replace(form.blocks[0], block).replace(form.block_ends[0], block_end)
        assert parse(name, list(other)) == parse(name, [ONE[name]])


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "glm45", "glm47"])
def test_text_is_sent_as_it_is_written_and_cut_without_markup(name):
    value = 'a "b"\n' * 300
    whole = written(FORMATS[name], [("f", json.dumps({"path": "a.py", "text": value}))])
    parameter = FORMATS[name].parameter
    assert parameter is not None
    text = whole[: whole.rindex(value) + len(value)] + parameter.end[:5]
    schema = {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
    parser = ToolParser(FORMATS[name], {"f": schema})
    sent = [part for character in text for part in parser.push(character)]
    so_far = "".join(part.text for part in sent if isinstance(part, CallArguments))
    assert json.loads(so_far + '"}') == {"path": "a.py", "text": value}
    assert len(sent) > len(value)
    assert parser.flush() == []


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_limit_cuts_anywhere_show_no_markup(name):
    whole = "\n\n" + written(FORMATS[name], [("f", '{"a": "x"}'), ("g", '{"n": 2}')])
    for end in range(len(whole)):
        parser = ToolParser(FORMATS[name])
        parts = parser.push(whole[:end]) + parser.flush(cut=True)
        assert not "".join(part.text for part in parts if isinstance(part, OutputText)).strip(), whole[:end]
        assert not any("<" in part.text for part in parts if isinstance(part, CallArguments)), whole[:end]


def test_broken_calls_show_no_tag_that_ends_them():
    parts = parse("kimi_k2", [ONE["kimi_k2"].replace("}<", "}} <") + "Sorry."])
    assert "".join(part.text for part in parts if isinstance(part, OutputText)) == "} Sorry."


def test_two_calls_and_a_call_that_is_cut():
    second = ONE["deepseek_v31"].removeprefix(B)
    text = ONE["deepseek_v31"].removesuffix(X) + "\n" + second
    assert [p.index for p in parse("deepseek_v31", [text]) if isinstance(p, CallEnd)] == [0, 1]
    cut = parse("deepseek_v31", [text[: -len(E + X) - 3]])
    assert cut[-2:] == [CallBegin(1, "f"), CallArguments(1, '{"a": "x<y", "n":')]


def test_a_tools_schema_says_which_glm_parameters_are_text():
    text = "<tool_call>f<arg_key>zip</arg_key><arg_value>08</arg_value>"
    text += "<arg_key>n</arg_key><arg_value>10</arg_value></tool_call>"
    for schema, value in (({"properties": {"n": {"type": "string"}}}, "10"), ({}, 10)):
        parts = ToolParser(FORMATS["glm47"], {"f": schema}).push(text)
        arguments = "".join(p.text for p in parts if isinstance(p, CallArguments))
        assert json.loads(arguments) == {"zip": "08", "n": value}


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.parameter])
def test_half_of_a_character_in_a_value_stays_an_escape(name):
    """No answer could be sent that has it as a character."""
    given = r'{"b": "\ud83d", "c": "\u00e9"}'
    end = "</arg_value>" if name.startswith("glm") else f"</{D}parameter>"
    _, arguments, _ = parse(name, [ONE[name].replace(f">2{end}", f">{given}{end}")])
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text.encode())["n"] == {"b": "\ud83d", "c": "\u00e9"}


def test_a_schema_of_references_to_long_lists_is_read_in_part():
    """The values are looked at for each argument, on the event loop of a server."""
    seen = 0

    class Value(str):
        def __eq__(self, other: object) -> bool:
            nonlocal seen
            seen += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    few, many = [Value(n) for n in range(9)], [Value(n) for n in range(2000)]
    assert not fits("x", {"enum": few}, {})
    assert (kinds({"enum": few}, {}), seen) == ({"string"}, 9)
    schema = {"$defs": {"a": {"enum": many}}, "anyOf": [{"$ref": "#/$defs/a"}] * 900}
    assert kinds(schema, schema) == KINDS
    assert fits("x", schema, schema)
    assert seen <= 100_000 + 9


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


SLIPS = {
    "the end of a call": f"</{D}invoke>",
    "the end of a block": f"</{D}tool_calls>",
    "the end of a number": f"2</{D}parameter>",
    "all ends behind the last value": f"2</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>",
    "the end of a text": f"x<y</{D}parameter>",
    "every end": None,
}


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_closing_tags_without_their_mark_end_what_they_close(name, slip):
    """Models forget the mark, which is a token of its own."""
    call = ONE[name]
    tags = SLIPS[slip] or f"x<y</{D}parameter>"
    tags = tags.replace("tool_calls", "function_calls") if name == "deepseek_v32" else tags
    written_so = call.replace(tags, tags.replace(D, ""))
    if slip == "every end":
        written_so = call.replace(f"</{D}", "</")
    assert written_so != call
    wanted = parse(name, ["I look." + call + "Done"])
    for size in (1, 2, 5, 1000):
        text = "I look." + written_so + "Done"
        assert parse(name, [text[i : i + size] for i in range(0, len(text), size)]) == wanted


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_value_may_hold_a_closing_tag_without_the_mark(name):
    """As a file of markup does."""
    text = "<a></parameter>\n<b/> </parameter></a></parameter>"
    call = ONE[name].replace("x<y", text)
    for size in (1, 3, 1000):
        _, arguments, _ = parse(name, [call[i : i + size] for i in range(0, len(call), size)])
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == {"a": text, "n": 2}


@pytest.mark.parametrize(
    ("name", "other"), [("deepseek_v32", "deepseek_v4"), ("deepseek_v4", "deepseek_v32")]
)
def test_the_block_of_the_sister_format_is_taken(name, other):
    for size in (1, 4, 1000):
        text = "I look." + ONE[other] + "Done"
        found = parse(name, [text[i : i + size] for i in range(0, len(text), size)])
        assert found == parse(name, ["I look." + ONE[name] + "Done"])
