"""Checks for keywords of a JSON Schema that llguidance would not honour, or not in bounded time.

Schemas that describe the same value can be combined, by ``allOf``, a reference or keywords side by side;
llguidance compiles the combination. So a fault is looked for in every combination of schemas that may occur.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text.references import referred
from mtp_jax.text.string_formats import EXPRESSIONS

# The lexer has a state for every remainder.
_LARGEST_MULTIPLE = 50_000
_SMALLEST_UNIT = 10**18  # the inverse of the finest step of doubles near 1
_BRANCHES = ("allOf", "anyOf", "oneOf")
_NO_STRINGS = ["null", "boolean", "number", "array", "object"]


# Keywords that hold further schemas: one schema, a list, or schemas by name.
_ONE = (
    "items",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# llguidance's dates include the 30th of February.
_EXACT = frozenset(("date", "date-time"))
_OURS = "#/$defs/mtp-jax.exact."


def in_full(schema: JsonMapping) -> JsonObject:
    """A schema rewritten where llguidance would not honour it: ``nullable``, the days of a month."""
    found, used = _in_full(schema), set[str]()
    for part in _objects(found):
        if isinstance(part.get("$ref"), str) and part["$ref"].startswith(_OURS):
            used.add(part["$ref"].removeprefix(_OURS))
    if used:
        exact = {
            _OURS.rpartition("/")[2] + name: {
                "anyOf": [{"type": "string", "pattern": f"^{EXPRESSIONS[name]}$"}, {"type": _NO_STRINGS}]
            }
            for name in sorted(used & _EXACT)
        }
        found["$defs"] = {**found.get("$defs", {}), **exact}
    return found


def _part_in_full(part: object) -> object:
    return _in_full(part) if isinstance(part, Mapping) else part


def _in_full(schema: JsonMapping) -> JsonObject:
    found: JsonObject = dict(schema)
    for key in _ONE:
        if isinstance(found.get(key), Mapping):
            found[key] = _in_full(found[key])
    for key in _LISTS:
        if isinstance(found.get(key), list | tuple):
            found[key] = [_part_in_full(part) for part in found[key]]
    for key in _NAMED:
        if isinstance(found.get(key), Mapping):
            found[key] = {name: _part_in_full(part) for name, part in found[key].items()}
    others = found.get("allOf", [])
    if isinstance(found.get("format"), str) and found["format"] in _EXACT and isinstance(others, list):
        found["allOf"] = [*others, {"$ref": _OURS + found["format"]}]
    if found.pop("nullable", None) is True:  # OpenAPI's
        kept = {key: found.pop(key) for key in ("$defs", "definitions") if key in found}
        found = {"anyOf": [found, {"type": "null"}], **kept}
    return found


def check_schema(schema: JsonMapping) -> None:
    """Raises RequestError for numbers that llguidance cannot honour."""
    _check_multiples(schema)
    _check_bounds(schema)


def _check_multiples(schema: object) -> None:
    found = (s["multipleOf"] for s in _objects(schema) if "multipleOf" in s)
    multiples = [Fraction(str(m)) for m in found if type(m) in (int, float)]
    # llguidance scales fractions up, to the least common multiple at most.
    scale = _common_multiple((m.denominator for m in multiples), _SMALLEST_UNIT)
    if not scale or not _common_multiple((abs(int(m * scale)) for m in multiples if m), _LARGEST_MULTIPLE):
        raise RequestError(
            f"multipleOf: the least common multiple of all of them is above {_LARGEST_MULTIPLE} of their "
            "smallest unit; use rounder ones"
        )


def _common_multiple(numbers: Iterable[int], most: int) -> int | None:
    """The least common multiple; None if it is above ``most``. Avoids large numbers."""
    common = 1
    for number in numbers:
        common = math.lcm(common, number) if number <= most else most + 1
        if common > most:
            return None
    return common


def _check_bounds(schema: JsonMapping) -> None:
    """Refuse a whole number as an exclusive bound if the other bound is less than 1 away."""
    for group in _of_one_value(schema):
        for key, others, whole in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), math.floor),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), math.ceil),
        ):
            excluded = {n for n in _numbers(group, key) if n == whole(n)}
            for n in (n for other in others for n in _numbers(group, other)):
                if n != whole(n) and whole(n) in excluded:
                    raise RequestError(
                        f"{key} = {whole(n)} with another bound of {n}, less than one away: llguidance "
                        f"would allow {whole(n)} itself; make that bound inclusive, or a fraction"
                    )


def _numbers(objects: Iterable[JsonMapping], key: str) -> list[int | float]:
    return [s[key] for s in objects if type(s.get(key)) in (int, float)]


def _of_one_value(schema: JsonMapping) -> Iterable[list[JsonMapping]]:
    """The objects of a schema, in groups that may describe one value together; groups may be too large."""
    above: dict[int, int] = {}

    def top(of: object) -> int:
        at = id(of)
        while (up := above.get(at, at)) != at:
            above[at] = above.get(up, up)
            at = up
        return at

    objects = list(_objects(schema))
    for s in objects:
        beside = [b for key in _BRANCHES if isinstance(s.get(key), list | tuple) for b in s[key]]
        if isinstance(s.get("$ref"), str):
            target = referred(schema, s["$ref"])
            if target is None:  # llguidance decides its meaning
                return [objects]
            beside.append(target)
        for other in beside:
            if isinstance(other, Mapping):
                above[top(other)] = top(s)
    groups = defaultdict(list)
    for s in objects:
        groups[top(s)].append(s)
    return groups.values()


def _objects(value: object) -> Iterator[JsonMapping]:
    """Every object in a schema, at any place."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _objects(part)
