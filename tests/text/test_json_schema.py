"""What comes out under a schema fits it, or the schema is refused."""

import json
from typing import Any

import jsonschema
import pytest

from mtp_jax.api.demo import demo_model
from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer

EOS = 1
BESIDE_ONE: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 0.5}


@pytest.fixture(scope="module")
def demo() -> tuple[Grammars, Tokenizer]:
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer is not None
    return Grammars(tokenizer.backend, tokenizer.vocab_size, [EOS]), tokenizer


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
