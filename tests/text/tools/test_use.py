"""What may be asked of tools, and what it makes of the output."""

import pytest

from mtp_jax.api.demo import demo_model
from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.grammar import Tool
from mtp_jax.text.tools.use import ToolUse

TOOLS = [Tool("f"), Tool("g", {"properties": {f"p{i}": {} for i in range(20_000)}})]
JSON = StructuredOutput(json_object=True)


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
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer is not None
    for form in ToolUse.FORMATS:  # the demo model has a token for "f", and none for a tag
        use = ToolUse.of(form, TOOLS[:1], "required")
        assert use is not None
        structured = use.structured(tokenizer, None)
        assert "<[" not in structured.behind(False, None)


@pytest.mark.parametrize("form", ToolUse.FORMATS)
def test_a_schema_of_any_size_goes_where_nothing_is_promised_and_only_json_beside_calls(form):
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer is not None
    use, forced = ToolUse.of(form, TOOLS), ToolUse.of(form, TOOLS, "required")
    assert use is not None
    assert forced is not None
    assert len(use.structured(tokenizer, JSON).behind(False, None)) < 3000
    with pytest.raises(RequestError, match="more than 65536 characters"):
        forced.structured(tokenizer, None).behind(False, None)
    with pytest.raises(RequestError, match="only JSON"):
        use.structured(tokenizer, StructuredOutput(regex="a"))
