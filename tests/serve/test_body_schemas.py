"""Lists and mappings of every body: the first wrong item is the only one that costs anything."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from serve.bodies.admin import ReleaseBody, ResumeBody, UpdateBody
from serve.bodies.fields import Biases, Body, first_wrong
from serve.bodies.responses import ResponsesBody
from serve.bodies.schema import CompletionBody
from serve.routes.table import ROUTES

KINDS = sorted({kind for route in ROUTES for kind in route.bodies}, key=lambda kind: kind.__name__)
_SIMPLE = {"bool", "int", "float", "str", "literal", "none"}  # each has one error
_COLLECTIONS = ("list", "set", "frozenset", "tuple", "generator")


def unbounded(kind: type[Body]) -> Iterator[str]:
    """Paths in a body's core schema at which a value may cause more than a few errors."""
    yield from _unbounded(kind.__pydantic_core_schema__, kind.__name__, False)


def _unbounded(schema: object, path: str, counted: bool) -> Iterator[str]:
    """counted: whether a mapping's members are counted, and then checked one after the other."""
    if isinstance(schema, list | tuple):
        for i, part in enumerate(schema):
            yield from _unbounded(part, f"{path}.{i}", counted)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in _COLLECTIONS and not schema.get("fail_fast"):
        yield f"{path}: a {kind} that goes on after its first wrong item"
    if kind == "union" and not {choice["type"] for choice in schema["choices"]} <= _SIMPLE:
        yield f"{path}: a union that tries one branch after the other"
    if kind == "dict" and not counted and not _takes_anything(schema):
        yield f"{path}: a mapping of any size whose members may be wrong"
    counted = kind in ("function-wrap", "nullable", "default") and (counted or _counts(schema))
    for name, part in schema.items():
        # A constant may be anything; a definition is visited where it is defined.
        if name not in ("default", "expected", "metadata", "serialization", "discriminator", "function"):
            yield from _unbounded(part, f"{path}.{name}", counted)


def _counts(schema: dict[str, Any]) -> bool:
    return schema.get("function", {}).get("function") is first_wrong


def _takes_anything(schema: dict[str, Any]) -> bool:
    """Whether no member of a mapping can be wrong: JSON's keys are strings."""
    keys, values = schema.get("keys_schema", {}), schema.get("values_schema", {})
    return keys in ({}, {"type": "str"}) and values.get("type", "any") == "any"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_value_of_a_body_has_more_than_a_few_errors(kind):
    assert [*unbounded(kind)] == []


def test_the_search_finds_lists_mappings_and_unions():
    class Wrong(Body):
        texts: list[str]
        deep: Annotated[list[Annotated[list[int], Field(max_length=3)]], Field(fail_fast=True)] | None = None
        either: str | list[int] | None = None
        simple: str | int | None = None
        numbers: dict[str, float]
        right: Biases | None = None
        anything: dict[str, Any] | None = None

    assert [found.partition(": ")[2].split()[1] for found in unbounded(Wrong)] == [
        "list",
        "list",
        "union",
        "list",
        "mapping",
    ]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponsesBody, {"input": [{"type": "reasoning", "summary": [1] * 99}]}),
        (ResponsesBody, {"input": [{"type": "reasoning", "content": [{}] * 99}]}),
        (ResponsesBody, {"input": "q", "include": [1] * 99}),
        (ReleaseBody, {"tags": ["gpu"] * 99}),
        (ResumeBody, {"tags": [1] * 99}),
        (UpdateBody, {"model_path": "a", "probe": [[["a"] * 99] * 99] * 64}),
        (UpdateBody, {"model_path": "a", "probe": [1] * 64}),
        (CompletionBody, {"prompt": "q", "logit_bias": {str(i): "" for i in range(9999)}}),
        (CompletionBody, {"prompt": "q", "logit_bias": {f"x{i}": "" for i in range(999)}}),
    ],
)
def test_one_error_is_made_for_many_wrong_items(kind: Callable[[], Body], body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)  # type: ignore[attr-defined]
    assert caught.value.error_count() <= 2  # a part without both of its fields
