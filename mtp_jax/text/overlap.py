"""Whether a JSON value can fit two schemas at once, as far as types, listed values and required keys tell."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import and_

from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text.references import referred
from mtp_jax.text.tools.values import Steps, fits, kind, kinds, listed

_MOST_PARTS = 20_000  # of all questions together: some tens of milliseconds
_DEEPEST = 8  # references and unions within each other: a deeper answer is "unknown"
_NONE = object()


class Overlap:
    """Answers questions about schemas that are parts of one schema."""

    def __init__(self, whole: JsonObject) -> None:
        self._whole, self._steps = whole, Steps(_MOST_PARTS)
        # The key is a schema's id. The entry holds the schema, so that no other schema gets that id.
        self._kinds: dict[int, tuple[object, frozenset[str]]] = {}
        self._listed: dict[int, tuple[object, frozenset[object] | None]] = {}

    def followed(self, schema: object) -> object:
        """The schema that a schema which is a reference alone refers to."""
        for _ in range(_DEEPEST):
            if not (isinstance(schema, Mapping) and schema.keys() == {"$ref"}):
                break
            schema = referred(self._whole, str(schema["$ref"]))
        return schema

    def all_apart(self, branches: Sequence[object], beside: JsonMapping) -> bool:
        """Whether no value fits two of the branches, and the schema beside them; False if that is unknown."""
        parts = [[*self._together(branch, 0), beside] for branch in branches]
        return all(self._apart(a, b, 0) for a, b in combinations(parts, 2))

    def _apart(self, one: list[object], other: list[object], depth: int) -> bool:
        """Whether no value fits all schemas of two lists."""
        if depth > _DEEPEST or not self._steps.take(depth):
            return False
        common = reduce(and_, map(self._kinds_of, [*one, *other]))
        if not common or self._values_differ(one, other) or self._values_differ(other, one):
            return True
        for mine, theirs in ((one, other), (other, one)):
            for branches in _unions(mine):
                each = (self._together(branch, 0) for branch in branches)
                if all(self._apart([*_plain(mine), *branch], theirs, depth + 1) for branch in each):
                    return True
        return common == {"object"} and any(
            self._apart(self._values(one, key), self._values(other, key), depth + 1)
            for key in _required([*one, *other])
        )

    def _kinds_of(self, schema: object) -> frozenset[str]:
        if (known := self._kinds.get(id(schema))) is None:
            known = self._kinds[id(schema)] = schema, kinds(schema, self._whole, self._steps)
        return known[1]

    def _listed_by(self, schema: object) -> frozenset[object] | None:
        """The values that a schema lists, with their types; None if it lists none, or arrays or objects."""
        if id(schema) not in self._listed:
            values = listed(schema) if isinstance(schema, Mapping) else None
            nested = values is None or any(isinstance(value, dict | list) for value in values)
            found = None if nested else frozenset((kind(value), value) for value in values or ())
            self._listed[id(schema)] = schema, found
        return self._listed[id(schema)][1]

    def _values_differ(self, one: list[object], other: list[object]) -> bool:
        """Whether one list of schemas names values, of which none fits the other."""
        mine, theirs = ([v for s in side if (v := self._listed_by(s)) is not None] for side in (one, other))
        if any(a.isdisjoint(b) for a in mine for b in theirs):
            return True
        named = [values for s in one if isinstance(s, Mapping) and (values := listed(s)) is not None]
        if not named:
            return False
        values = (v for v in named[0] if all(fits(v, s, self._whole, self._steps) for s in other))
        return next(values, _NONE) is _NONE

    def _values(self, schemas: list[object], key: str) -> list[object]:
        """The schemas that the value of a key of an object has to fit."""
        found: list[object] = []
        for schema in schemas:
            if not isinstance(schema, Mapping):
                continue
            known = schema.get("properties")
            if isinstance(known, Mapping) and key in known:
                found += self._together(known[key], 0)
            elif "patternProperties" not in schema:
                found += self._together(schema.get("additionalProperties", True), 0)
        return found or [True]

    def _together(self, schema: object, depth: int) -> list[object]:
        """A schema, and the schemas that its values have to fit besides."""
        found = [schema]
        if not isinstance(schema, Mapping) or depth > _DEEPEST or not self._steps.take(depth):
            return found
        if isinstance(schema.get("$ref"), str):
            target = referred(self._whole, schema["$ref"])
            found += [] if target is None else self._together(target, depth + 1)
        for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found += self._together(branch, depth + 1)
        return found


def _unions(schemas: list[object]) -> Iterator[list[object]]:
    for schema in schemas:
        for key in ("anyOf", "oneOf"):
            if isinstance(schema, Mapping) and isinstance(schema.get(key), list) and schema[key]:
                yield schema[key]


def _plain(schemas: list[object]) -> list[object]:
    """The schemas without branches: a branch is looked at in the place of a schema that has several."""
    return [s for s in schemas if not (isinstance(s, Mapping) and ("anyOf" in s or "oneOf" in s))]


def _required(schemas: list[object]) -> list[str]:
    keys = [schema.get("required") for schema in schemas if isinstance(schema, Mapping)]
    return list(
        dict.fromkeys(key for each in keys if isinstance(each, list) for key in each if isinstance(key, str))
    )
