"""Conversations reach templates that know tools and templates that do not."""

import json

import pytest

from mtp_jax.text.chat_template import ChatTemplate
from mtp_jax.text.tools.conversation import for_template, written
from mtp_jax.text.tools.formats import FORMATS, format_of
from mtp_jax.text.tools.parser import ToolParser
from mtp_jax.text.tools.parts import CallArguments, CallBegin
from tests.text.tools.families import TEMPLATES

ARGUMENTS = '{"city":"R\\u00e9","n":[1,2]}'
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "7"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", FORMATS)
def test_a_parser_reads_what_is_written(name):
    parts = ToolParser(FORMATS[name], {}).push(written(FORMATS[name], [("f", ARGUMENTS), ("g", "{}")]))
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f", "g"]
    texts = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in (0, 1)]
    assert [json.loads(text) for text in texts] == [{"city": "R\u00e9", "n": [1, 2]}, {}]


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found_in_a_template(name):
    assert format_of("{{ tool_calls }}" + written(FORMATS[name], [("f", "{}"), ("g", '{"a": 1}')])) == name
    assert format_of("{{ messages }}") == "json"
    assert format_of(TEMPLATES[name]) == name
    assert format_of("{{ '<tool_call>' + other + '</tool_call>' }}") == "json"


@pytest.mark.parametrize(
    "expression",
    ["c.arguments", "c.arguments | tojson", "('' + c.arguments)", "('' ~ c.arguments)", "c.arguments.n"],
)
def test_templates_take_arguments_as_text_or_as_an_object(expression):
    template = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set c = t.function %}{{ " + expression
    )
    template += " }}{% endfor %}{% endfor %}"
    messages = for_template(template, FORMATS["json"], TURNS, None)
    text = ChatTemplate(template).render({"messages": messages})
    expected = [1, 2] if expression.endswith(".n") else json.loads(ARGUMENTS)
    assert json.loads(text) == expected
    if "tojson" not in expression and not expression.endswith(".n"):
        assert text == ARGUMENTS  # unchanged, so that the prefix cache knows it


def test_half_of_a_character_in_arguments_is_replaced():
    """A model has cut an emoji, and the prompt of each further turn has its call."""
    arguments = r'{"a": {"b": "x\ud83d"}, "c": "\ud83d\ude00"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.items() | list | tojson }}")
    rendered = template.render({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert rendered == '[["a", {"b": "x\ufffd"}], ["c", "\U0001f600"]]'
    assert "x\ufffd" in written(FORMATS["glm45"], [("f", arguments)])


def test_a_template_without_tools_is_told_in_text():
    system, assistant, result = for_template("{{ messages }}", FORMATS["json"], TURNS, [TOOL])
    assert system["content"].startswith("Be brief.\n\nYou may call")
    assert '"name": "f"' in system["content"]
    assert assistant == {"role": "assistant", "content": written(FORMATS["json"], [("f", ARGUMENTS)])}
    assert result == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}
    (first, *_) = for_template("{{ messages }}", FORMATS["json"], TURNS[1:], [TOOL])
    assert first["role"] == "system"


def test_a_template_with_tools_gets_them_as_they_are():
    found = for_template("{{ tools }} {{ tool_calls }}", FORMATS["json"], TURNS, [TOOL])
    assert found[0] == TURNS[0]
    assert found[2] == TURNS[2]
    assert TURNS[1]["tool_calls"] == [CALL]  # what the caller gave is left alone
