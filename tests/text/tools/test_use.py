"""What may be asked of tools, and what it makes of the output."""

import functools

import pytest

from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tools.conversation import written
from mtp_jax.text.tools.tool import Tool
from mtp_jax.text.tools.use import ToolUse
from tests.text.helpers import demo

EOS = 1
TOOLS = [Tool("f"), Tool("g", {"properties": {f"p{i}": {} for i in range(20_000)}})]
JSON = StructuredOutput(json_object=True)


@functools.cache
def of_demo() -> Grammars:
    """Grammars of the demo model: their helper process is started once."""
    return Grammars(demo(), demo().vocab_size, [EOS])


def test_choices():
    assert ToolUse.of("json", []) is None
    assert ToolUse.of("json", TOOLS, "none") is None
    named = ToolUse.of("json", TOOLS, "named", name="g")
    assert named is not None
    assert (named.tools, named.forced, named.several) == ((TOOLS[1],), True, False)
    assert ToolUse.of("json", TOOLS) == ToolUse(named.form, tuple(TOOLS), False, True)


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([], "required", "there are no tools"),
        (TOOLS, "named", "'h' is not among the tools f, g"),
        ([*TOOLS, Tool("f")], "auto", "'f' is there twice"),
    ],
)
def test_choices_that_do_not_go_with_the_tools(tools, choice, says):
    with pytest.raises(RequestError, match=says):
        ToolUse.of("json", tools, choice, name="h")


def test_no_ordinary_token_is_given_by_its_id():
    for form in ToolUse.FORMATS:  # the demo model has a token for "f", and none for a tag
        use = ToolUse.of(form, TOOLS[:1], "required")
        assert use is not None
        structured = use.structured(demo(), None)
        assert "<[" not in structured.behind(False, None, demo().added_id)


@pytest.mark.parametrize("form", ToolUse.FORMATS)
def test_a_schema_of_any_size_goes_where_nothing_is_promised_and_only_json_beside_calls(form):
    use, forced = ToolUse.of(form, TOOLS), ToolUse.of(form, TOOLS, "required")
    assert use is not None
    assert forced is not None
    assert len(use.structured(demo(), JSON).behind(False, None, demo().added_id)) < 3000
    with pytest.raises(RequestError, match="more than 65536 characters"):
        forced.structured(demo(), None).behind(False, None, demo().added_id)
    with pytest.raises(RequestError, match="only JSON"):
        use.structured(demo(), StructuredOutput(regex="a"))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", ToolUse.FORMATS)
def test_a_prompt_that_opens_a_thought(form, choice):
    """An output may end in it, unless a call is forced, and go on to a call with its end or without."""
    grammars = of_demo()
    use = ToolUse.of(form, TOOLS[:1], choice)
    assert use is not None
    prompt, wanted = grammars.encode("x\n<think>\n"), use.structured(demo(), None)
    call = written(use.form, [("f", "{}")])
    for output, ends in (("Well", not use.forced), (f"Well {call}", True), (f"Well</think>\n{call}", True)):
        matcher = grammars.matcher(wanted, [EOS], prompt)
        ids = grammars.encode(output)
        assert matcher.inner.try_consume_tokens(ids) == len(ids), output
        assert matcher.inner.is_accepting() == ends, output


def test_a_grammar_of_ones_own_begins_behind_a_thought():
    grammars = of_demo()
    matcher = grammars.matcher(StructuredOutput(lark='start: "a" | "b"'), [EOS], grammars.encode("<think>"))
    ids = grammars.encode("well</think>b")
    assert matcher.inner.try_consume_tokens(ids) == len(ids)
    assert matcher.inner.is_accepting()
