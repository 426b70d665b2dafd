"""Schemas that a grammar can hold an output to allow the same as before, or more, and say which."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from mtp_jax.errors import SchemaError
from mtp_jax.text.enforceable import enforceable
from mtp_jax.text.grammar import StructuredOutput

DEFS: dict[str, Any] = {
    "names": {"type": "string", "enum": ["a", "b"]},
    "one": {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]},
    "two": {"type": "object", "properties": {"k": {"const": "y"}}, "required": ["k"]},
    "both": {"allOf": [{"$ref": "#/$defs/one"}, {"maxProperties": 2}]},
}
PLAIN: list[Any] = [
    *(None, True, 0, 1, 2.5, "", "a", "ab", "2024-13-01", [], [1], [1, 1], [1, 2], ["a", "a"], {}),
    *({"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": "s"}, {"c": 1}, {"ab": 1}, {"": 1}, {"a": [1, 1]}),
    *({"k": "x"}, {"k": "y"}, {"k": "x", "a": 1, "b": 2}, [{"k": "x"}], {"k": {"k": "y"}}),
]
VALUES = [*PLAIN, *([value] for value in PLAIN), *({"k": value} for value in PLAIN)]
INTEGER: dict[str, Any] = {"type": "integer"}
SAME: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    {"propertyNames": {"type": ["null", "string"], "description": "d", "format": "x"}},
    {"propertyNames": {"$ref": "#/$defs/names"}, "additionalProperties": INTEGER},
    {"propertyNames": {"const": "a"}, "properties": {"a": {"type": "string"}, "c": True}},
    {"propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER},
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"not": False},
    {"properties": {"a": {"not": {}}}},
    {"if": {"type": "string"}, "then": {}, "else": True},
    {"then": {"type": "string"}, "minContains": 3},
    {"contains": INTEGER, "minContains": 0},
    {"dependentRequired": {"a": []}, "dependentSchemas": {"a": True}, "dependencies": {"a": ["b"]}}
    | {"required": ["b"]},
    {"properties": {"a": INTEGER}, "unevaluatedProperties": False},
    {"additionalProperties": INTEGER, "allOf": [{}], "unevaluatedProperties": False},
    {"prefixItems": [INTEGER], "unevaluatedItems": False},
    {"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]},
    {"oneOf": [{"$ref": "#/$defs/both"}, {"type": "string"}, {"$ref": "#/$defs/two"}]},
    {
        "type": "object",
        "oneOf": [{"required": ["a"], "properties": {"a": v}} for v in (INTEGER, {"enum": ["s"]})],
    },
    {"oneOf": [INTEGER, {"enum": ["a", 2.5]}], "anyOf": [{"type": "string"}, {"minimum": 1}]},
    {"oneOf": [{"anyOf": [{"type": "null"}, {"const": 1}]}, {"const": 0}]},
    {"format": "path", "$schema": "http://json-schema.org/schema#", "$dynamicAnchor": "m"},
    {"minProperties": 1, "properties": {"a": {}}, "additionalProperties": False},
]
WIDER: list[tuple[dict[str, Any], str]] = [
    ({"propertyNames": {"minLength": 1}}, "propertyNames"),
    ({"propertyNames": {"pattern": "(?=a)a"}}, "propertyNames"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": INTEGER, "then": {"minimum": 1}}, "if"),
    ({"contains": INTEGER}, "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"anyOf": [{"prefixItems": [{}]}, {}], "unevaluatedItems": INTEGER}, "unevaluatedItems"),
    ({"oneOf": [INTEGER, {"minimum": 1}]}, "oneOf"),
    ({"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/both"}]}, "oneOf"),
    ({"pattern": "^(?!a)"}, "pattern"),
    ({"patternProperties": {"^(?=a)": True}, "additionalProperties": False}, "patternProperties"),
    ({"patternProperties": {"^a": {"type": "string"}, "b$": INTEGER}}, "patternProperties"),
    ({"minProperties": 2, "properties": {"a": {}, "b": {}}}, "minProperties"),
]  # fmt: skip
PLACES: list[tuple[Any, tuple[str, ...]]] = [
    (lambda s: s, ()),
    (lambda s: {"properties": {"k": s}}, ("properties", "k")),
    (lambda s: {"items": s}, ("items",)),
    (lambda s: {"anyOf": [{"type": "null"}, s]}, ("anyOf", "1")),
    (lambda s: {"$ref": "#/$defs/here", "$defs": {"here": s}}, ("$defs", "here")),
]


def allowed(schema: dict[str, Any]) -> list[bool]:
    whole = Draft202012Validator(schema | {"$defs": DEFS | schema.get("$defs", {})})
    return [whole.is_valid(value) for value in VALUES]


def rewritten(schema: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[tuple[str, ...], str]]]:
    copy = json.loads(json.dumps(schema | {"$defs": DEFS | schema.get("$defs", {})}))
    found = [(fault.place, fault.keyword) for fault in enforceable(copy)]
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(copy)))
    again = json.loads(json.dumps(copy))
    assert enforceable(again) == []
    assert again == copy
    return copy, found


@pytest.mark.parametrize("schema", SAME, ids=json.dumps)
def test_what_can_be_said_otherwise_allows_the_same(schema):
    for put, _ in PLACES:
        placed = put(schema)
        copy, found = rewritten(placed)
        assert found == []
        assert allowed(copy) == allowed(placed)


@pytest.mark.parametrize(("schema", "keyword"), WIDER, ids=json.dumps)
def test_what_cannot_be_enforced_is_named_and_without_it_more_is_allowed(schema, keyword):
    for put, place in PLACES:
        placed = put(schema)
        copy, found = rewritten(placed)
        assert found == [(place, keyword)]
        before, after = allowed(placed), allowed(copy)
        assert all(new for old, new in zip(before, after, strict=True) if old)
        assert before != after


def test_values_and_definitions_that_nothing_refers_to_are_left_alone():
    schema = {
        "const": {"not": {"a": 1}},
        "default": {"uniqueItems": True},
        "$defs": {"x": {"not": {"type": "null"}}},
    }
    copy = json.loads(json.dumps(schema))
    assert enforceable(copy) == []
    assert copy == schema


def test_the_work_of_a_schema_is_bounded(monkeypatch):
    """Each of many tools' schemas is walked once; many branches are compared within a budget."""
    checked = list[str]()
    real = LLMatcher.validate_grammar
    monkeypatch.setattr(LLMatcher, "validate_grammar", lambda text: checked.append(text) or real(text))
    part = {"type": "object", "properties": {f"p{i}": {"pattern": f"^{i % 5}-bounded"} for i in range(40)}}
    loop = {"$ref": "#", "properties": {f"q{i}": {"$ref": "#/$defs/part"} for i in range(40)}}
    assert enforceable({**loop, "$defs": {"part": part}}) == []
    assert len(checked) == 5
    branches = [
        {"properties": {"k": {"enum": [f"{i}-{j}" for j in range(20)]}}, "required": ["k"]}
        for i in range(400)
    ]
    (fault,) = enforceable({"type": "object", "oneOf": branches})
    assert fault.keyword == "oneOf"


def test_a_strict_form_is_refused_and_another_says_where_it_is_wider():
    schema = {"properties": {"x": {"items": {"uniqueItems": True}}}}
    with pytest.raises(
        SchemaError, match=r"^the schema\.properties\.x\.items: uniqueItems cannot be enforced; "
    ):
        StructuredOutput(json_schema=schema)
    wider = StructuredOutput(json_schema=schema, strict=False)
    assert [(f.place, f.keyword) for f in wider.widened] == [(("properties", "x", "items"), "uniqueItems")]
    assert schema == {"properties": {"x": {"items": {"uniqueItems": True}}}}
