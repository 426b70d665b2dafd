"""What comes out under a schema fits it, or the schema is refused."""

import json
import re
from typing import Any

import jsonschema
import pytest

from mtp_jax.api.demo import demo_model
from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.json_schema import in_full
from mtp_jax.text.string_formats import EXPRESSIONS
from mtp_jax.text.tokenizer import Tokenizer

EOS = 1
BESIDE_ONE: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 0.5}


@pytest.fixture(scope="module")
def demo() -> tuple[Grammars, Tokenizer]:
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer is not None
    return Grammars(tokenizer, tokenizer.vocab_size, [EOS]), tokenizer


def produced(demo: tuple[Grammars, Tokenizer], schema: dict[str, Any], text: str) -> bool:
    """Whether the text can come out."""
    grammars, tokenizer = demo
    inner = grammars.matcher(StructuredOutput(json_schema=schema), [EOS]).inner
    ids = tokenizer.encode(text, add_special_tokens=False)
    return inner.try_consume_tokens(ids) == len(ids) and inner.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        BESIDE_ONE,
        {"exclusiveMinimum": 1, "exclusiveMaximum": 1.25},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": -2.5, "exclusiveMaximum": -2.0},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$ref": "#/$defs/positive", "maximum": 0.5, "$defs": {"positive": {"exclusiveMinimum": 0}}},
        {
            "properties": {"a": {"anyOf": [{"$ref": "#/$defs/p~1q"}, {"type": "null"}], "maximum": 0.5}},
            "$defs": {"p/q": {"exclusiveMinimum": 0}},
        },
    ],
    ids=json.dumps,
)
def test_bounds_that_would_be_let_through_are_refused(schema):
    with pytest.raises(RequestError, match="would allow"):
        _ = StructuredOutput(json_schema=schema).grammar


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"exclusiveMinimum": 0.5, "maximum": 0.75},
        {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
        {"exclusiveMinimum": -2.5, "exclusiveMaximum": -1},
        {"minimum": 0, "maximum": 0.5},
    ],
    ids=json.dumps,
)
def test_other_bounds_hold(bounds, demo):
    schema = {"type": "number", **bounds}
    texts = [f"{n}{end}" for n in (-2, -1, "-0", 0, 1) for end in ("", ".0", ".5", ".25", ".75")]
    possible = [t for t in texts if produced(demo, schema, t)]
    assert possible
    for text in possible:
        jsonschema.validate(json.loads(text), schema)


def test_bounds_of_different_values_do_not_meet():
    schema = {"properties": {"price": {"exclusiveMinimum": 0}, "rate": {"minimum": 0, "maximum": 0.5}}}
    assert StructuredOutput(json_schema=schema).grammar


def test_a_key_has_one_spelling(demo):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}, "\u0001": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    fits = ['{"a":1}', '{"\\n":1}', '{"b":"\\n"}', '{"\u00e9":"x"}', '{"\\u0001":1}']
    assert all(produced(demo, schema, text) for text in fits)
    wrong = ['{"\\u0061":"x"}', '{"\\u000a":"x"}', '{"\\u0001":"x"}']
    assert not any(produced(demo, schema, text) for text in wrong)


def test_a_schema_of_many_references_is_looked_at_once():
    refs = {f"k{i}": {"$ref": f"#/properties/k{(i * 7) % 900}"} for i in range(900)}
    assert StructuredOutput(json_schema={"properties": refs}).grammar
    assert StructuredOutput(json_schema={"$defs": {"a": {"$ref": "#elsewhere"}}, "type": "null"}).grammar


TEXTS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31"]),
    "time": (["23:59:60Z", "01:02:03.5+02:00"], ["24:00:00Z", "01:02:03", "1:02:03Z"]),
    "date-time": (["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
    "duration": (["P1Y2M3D", "PT5M", "P3W", "P1DT12H"], ["P", "PT", "P1YT", "1D", "P1W2D"]),
    "email": (["a.b+c@d.example"], ["a@", "@b", "a b@c.d", "a..b@c.d"]),
    "hostname": (["a-b.example", "x"], ["-a.b", "a..b", "a_b", "a" * 64]),
    "ipv4": (["0.0.0.0", "255.1.20.249"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "a::b:c", "1:2:3:4:5:6:7::"],
        ["1", ":::", "1::2::3", "12345::"],
    ),
    "uuid": (["123e4567-E89b-12d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-42661417400"]),
    "uri": (["https://a.b/c?d=%20#e", "urn:x:y"], ["a b:c", "//a", "http://a b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_expressions_of_formats(name):
    assert EXPRESSIONS.keys() == TEXTS.keys()
    right, wrong = TEXTS[name]
    for text in [*right, *wrong]:
        assert bool(re.fullmatch(EXPRESSIONS[name], text)) == (text in right), text


def test_what_llguidance_does_not_know_is_said_in_other_words():
    day = {"type": "string", "format": "date"}
    schema = {
        "properties": {"nullable": day, "n": {"type": "integer", "nullable": True}},
        "enum": [{"nullable": True}],
    }
    full = in_full({**schema, "$defs": {"a": {}}, "items": [day], "nullable": False})
    exact = {"$ref": "#/$defs/mtp-jax.exact.date"}
    assert full["properties"] == {
        "nullable": {**day, "allOf": [exact]},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    assert full["enum"] == [{"nullable": True}]
    assert full["items"] == [{**day, "allOf": [exact]}]
    assert full["$defs"].keys() == {"a", "mtp-jax.exact.date"}
    assert in_full({"type": "string"}) == {"type": "string"}
    assert in_full({**day, "nullable": True, "$defs": {}}).keys() == {"anyOf", "$defs"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-2-9"']),
        ({"format": "date-time"}, ['"2024-02-29T01:02:03Z"', "5"], ['"2023-02-29T01:02:03Z"']),
        (
            {"type": "string", "format": "date", "nullable": True},
            ['"2024-02-29"', "null"],
            ['"2023-02-29"', "5"],
        ),
        ({"items": {"format": "date"}, "allOf": [{"maxItems": 1}]}, ['["2024-02-29"]'], ['["2023-02-29"]']),
    ],
)
def test_days_that_a_month_has_and_nullable(demo, schema, right, wrong):
    for text in [*right, *wrong]:
        assert produced(demo, schema, text) == (text in right), text
