"""A JSON Schema without the keywords that no grammar here can hold an output to.

A keyword that demands nothing is dropped, as an unknown ``format`` is, which is an annotation by JSON Schema
(2020-12, validation, 7.2.1). Some keywords are said in keywords that llguidance knows. A keyword that can be
kept to in neither way is dropped, too, and reported: the schema that remains allows all that the first one
allows, since no keyword that stays turns an assertion around, and ``oneOf`` becomes ``anyOf``.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from llguidance import LLMatcher

from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text.overlap import Overlap
from mtp_jax.text.references import referred
from mtp_jax.text.string_formats import EXPRESSIONS
from mtp_jax.text.tools.values import listed

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")
# Keywords that may refuse a value.
_ASSERTIONS = frozenset((
    "$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf",
    "const", "contains", "dependencies", "dependentRequired", "dependentSchemas", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxItems", "maxLength",
    "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required",
    "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
))  # fmt: skip
_APPLIED = ("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas")
_DRAFTS = frozenset(
    [f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)]
    + [f"https://json-schema.org/draft/{date}/schema" for date in ("2019-09", "2020-12")]
)
_MOST_COPIED = 2**14  # characters of the copies of a schema
_MOST_PATTERNS = 8  # of which llguidance compares each two
_CANNOT = "cannot be enforced"


class Unenforced(NamedTuple):
    """A keyword that has been dropped.

    Attributes:
        place: the path of the schema that has it.
        why: text to follow the keyword.
    """

    place: tuple[str, ...]
    keyword: str
    why: str = _CANNOT


def enforceable(schema: JsonObject) -> list[Unenforced]:
    """Rewrite a schema, and the parts that it refers to, in place; return the keywords dropped, in order."""
    found: list[Unenforced] = []
    visited: set[int] = set()
    overlap = Overlap(schema)
    waiting: list[tuple[object, tuple[str, ...]]] = [(schema, ())]
    while waiting:
        part, place = waiting.pop()
        if not isinstance(part, dict) or id(part) in visited:
            continue
        visited.add(id(part))
        target, wrong = _target(part, schema)
        found += [Unenforced(place, "$ref", wrong)] if wrong else []
        for keyword, rule in _RULES.items():
            if keyword in part and (why := rule(part, overlap)):
                found.append(Unenforced(place, keyword, why))
        further = [(inner, (*place, *path)) for inner, path in _within(part)]
        waiting += reversed([*further, target] if target else further)
    return found


def _within(schema: JsonObject) -> Iterator[tuple[object, tuple[str, ...]]]:
    """The schemas within a schema, and their paths."""
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            yield from ((part, (key, str(i))) for i, part in enumerate(value))
        elif key in _ONE:
            yield value, (key,)
        elif key in _NAMED and isinstance(value, dict):
            yield from ((part, (key, name)) for name, part in value.items())


def _target(schema: JsonObject, whole: JsonObject) -> tuple[tuple[object, tuple[str, ...]] | None, str]:
    """The part that a schema refers to, with its path; a text if there is none, where ``$ref`` is dropped."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or (reference[:1] == "#" and reference[:2] not in ("#", "#/")):
        return None, ""  # none, or an anchor
    target = referred(whole, reference)
    if target is not None:
        return (target, tuple(reference.split("/")[1:])), ""
    if '"$id": "' in json.dumps(whole):  # a part may have this address; llguidance knows
        return None, ""
    del schema["$ref"]
    where = "names no part of the schema" if reference[:1] == "#" else "refers to another document"
    return None, f"= {reference!r:.60} {where}"


def _demands(schema: object) -> bool:
    """Whether a schema may refuse a value."""
    return schema is not True and not (isinstance(schema, Mapping) and _ASSERTIONS.isdisjoint(schema))


def _rename(schema: JsonObject, keyword: str, new: str) -> None:
    """Rename a keyword at its place: the order of keywords is that of the properties that are written."""
    entries = [(new if key == keyword else key, value) for key, value in schema.items()]
    schema.clear()
    schema.update(entries)


def _unevaluated(keyword: str, other: str) -> "_Rule":
    """The rule for a keyword that means ``other`` where no schema beside it may evaluate anything."""

    def rule(schema: JsonObject, overlap: Overlap) -> str:
        del overlap
        instead = "additionalItems" if isinstance(schema.get(other), list) else other
        if instead in schema or not _demands(schema[keyword]):
            del schema[keyword]
        elif not any(key in schema for key in _APPLIED) and "contains" not in schema:
            _rename(schema, keyword, instead)
        else:
            del schema[keyword]
            return _CANNOT
        return ""

    return rule


def _not(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    wrong = schema.pop("not")
    if wrong is False:
        return ""
    if _demands(wrong):
        return _CANNOT
    schema["enum"] = []  # nothing is allowed
    return ""


def _if(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    then, other = (schema.pop(key, True) for key in ("then", "else"))
    has_if = schema.pop("if", None) is not None
    return _CANNOT if has_if and (_demands(then) or _demands(other)) else ""


def _contains(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    least, most = (schema.pop(key, None) for key in ("minContains", "maxContains"))
    has = schema.pop("contains", None) is not None
    return _CANNOT if has and (least != 0 or most is not None) else ""


def _property_names(schema: JsonObject, overlap: Overlap) -> str:
    """Turn the names into properties or a pattern."""
    names = overlap.followed(schema.pop("propertyNames"))
    if not isinstance(names, Mapping):
        return "" if names is True else _CANNOT
    demands = _of_a_string(names)
    others, known = schema.get("additionalProperties", True), schema.get("properties", {})
    if not demands:
        return ""
    if "patternProperties" in schema or not isinstance(known, Mapping) or len(demands) > 1:
        return _CANNOT
    if "pattern" in demands and not known:
        if why := _wrong(demands["pattern"]):
            return f"with the pattern {why}"
        schema["patternProperties"], schema["additionalProperties"] = {demands["pattern"]: others}, False
        return ""
    names = listed(demands)
    if names is None or not _may_copy(others, len(names)):
        return _CANNOT
    named = {name: known.get(name, others) for name in names if isinstance(name, str)}
    # The order is that in which properties are written.
    first = {name: named.get(name, False) for name in known}
    schema["properties"], schema["additionalProperties"] = first | named, False
    return ""


def _of_a_string(schema: JsonMapping) -> JsonObject:
    """The keywords of a schema that may refuse a string."""
    demands = {key: value for key, value in schema.items() if key in _ASSERTIONS}
    types = demands.get("type", "string")
    if "string" in (types if isinstance(types, list) else [types]):
        demands.pop("type", None)
    if demands.get("format") not in EXPRESSIONS:
        demands.pop("format", None)
    return demands


def _may_copy(schema: object, times: int) -> bool:
    """Whether a schema may be copied that often; copies of copies would grow without measure."""
    text = json.dumps(schema)
    return len(text) * times <= _MOST_COPIED and '"propertyNames"' not in text


def _unique(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    asked, most = schema.pop("uniqueItems"), schema.get("maxItems")
    return _CANNOT if asked is not False and (not isinstance(most, int) or most > 1) else ""


def _dependent(keyword: str) -> "_Rule":
    """The rule for keys, or a schema, that an object must fit if it has a key."""

    def rule(schema: JsonObject, overlap: Overlap) -> str:
        del overlap
        required, wanted = schema.get("required", []), schema.pop(keyword)
        if not isinstance(wanted, Mapping) or not isinstance(required, list):
            return _CANNOT
        free = (
            all(name in required for name in needs) if isinstance(needs, list) else not _demands(needs)
            for needs in wanted.values()
        )
        return "" if all(free) else _CANNOT

    return rule


def _format(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    if isinstance(schema["format"], str) and schema["format"] not in EXPRESSIONS:
        del schema["format"]
    return ""


def _pattern(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    wrong = isinstance(schema["pattern"], str) and _wrong(schema["pattern"])
    if wrong:
        del schema["pattern"]
    return wrong or ""


def _patterns(schema: JsonObject, overlap: Overlap) -> str:
    """Drop keys by patterns; then the schema of other keys cannot be said to hold for a key either."""
    del overlap
    patterns = schema["patternProperties"]
    if not isinstance(patterns, Mapping):
        return ""
    wrong = next(filter(None, map(_wrong, patterns)), "")
    if not wrong and 1 < len(patterns) <= _MOST_PATTERNS:
        alone = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
        if LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(alone))):
            wrong = f"{_CANNOT}: a key may match two of its patterns"
    if wrong:
        del schema["patternProperties"]
        schema.pop("additionalProperties", None)
    return wrong


def _count(keyword: str) -> "_Rule":
    """The rule for a number of properties, which llguidance keeps to if no named property is optional."""

    def rule(schema: JsonObject, overlap: Overlap) -> str:
        del overlap
        known, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(known, Mapping) or not isinstance(required, list):
            return ""
        optional = known.keys() - {name for name in required if isinstance(name, str)}
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        given = len(known) - len(optional)
        if not optional or not isinstance(least, int) or not isinstance(most, int | None):
            return ""
        if (least <= given and most is None) or (
            "patternProperties" not in schema
            and schema.get("additionalProperties") is False
            and least - given <= 1
            and most in (None, given + 1)
        ):
            return ""
        del schema[keyword]
        return f"{_CANNOT} where some properties are optional"

    return rule


def _one_of(schema: JsonObject, overlap: Overlap) -> str:
    branches = schema["oneOf"]
    if not isinstance(branches, list) or not branches:
        return ""
    beside = {key: value for key, value in schema.items() if key != "oneOf"}
    apart = overlap.all_apart(branches, beside)
    if "anyOf" in schema:
        all_of = schema.get("allOf")
        del schema["oneOf"]
        schema["allOf"] = [*(all_of if isinstance(all_of, list) else ()), {"anyOf": branches}]
    else:
        _rename(schema, "oneOf", "anyOf")
    return "" if apart else f"{_CANNOT}: a value may fit two of its schemas; make it anyOf"


def _cannot(keyword: str) -> "_Rule":
    def rule(schema: JsonObject, overlap: Overlap) -> str:
        del schema[keyword], overlap
        return _CANNOT

    return rule


def _drop(keyword: str) -> "_Rule":
    """The rule for a keyword that demands nothing."""

    def rule(schema: JsonObject, overlap: Overlap) -> str:
        del schema[keyword], overlap
        return ""

    return rule


def _dialect(schema: JsonObject, overlap: Overlap) -> str:
    del overlap
    if str(schema["$schema"]).rstrip("#") not in _DRAFTS:
        del schema["$schema"]
    return ""


_Rule = Callable[[JsonObject, Overlap], str]
"""Rewrites the schema where it must; returns the reason why it had to be widened, or ""."""
# The first rules ask for keywords that later rules take away.
_RULES: dict[str, _Rule] = {
    "$schema": _dialect,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "not": _not,
    "if": _if,
    "then": _if,
    "else": _if,
    "contains": _contains,
    "minContains": _contains,
    "maxContains": _contains,
    "propertyNames": _property_names,
    "uniqueItems": _unique,
    **{name: _dependent(name) for name in ("dependentRequired", "dependentSchemas", "dependencies")},
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _patterns,
    **{name: _count(name) for name in ("minProperties", "maxProperties")},
    "oneOf": _one_of,
    **{name: _cannot(name) for name in ("$dynamicRef", "$recursiveRef")},
    **{name: _drop(name) for name in ("$dynamicAnchor", "$recursiveAnchor")},
}


@lru_cache(maxsize=128)
def _wrong(pattern: str) -> str:
    """The reason why llguidance cannot take a regular expression, in its words; "" if it can."""
    schema = {"type": "string", "pattern": pattern}
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if not error:
        return ""
    words = next((line for line in error.splitlines() if line.startswith("error: ")), error.splitlines()[0])
    return f"= {pattern!r:.60} {_CANNOT}: {words.removeprefix('error: ').partition(';')[0]}"
