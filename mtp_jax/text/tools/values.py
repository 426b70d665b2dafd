"""Values of arguments that a model writes without quotes, as text or as JSON.

``5`` may be a number or a string. The schema decides, as far as its types and lists of values tell.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, or_

from mtp_jax.json_object import JsonMapping
from mtp_jax.text.references import referred

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_LITERALS = {"null": ("null",), "boolean": ("true", "false")}
_NUMBER = frozenset("-+.0123456789eE")
_SPACE = " \t\r\n"


class Steps:
    """Limits the number and depth of the parts of a schema that are read; a part beyond allows any value.

    The number of listed values is limited, too: each of many references may name one list.
    """

    def __init__(self, most: int = 1000) -> None:
        """most: number of parts."""
        self._left, self._values, self._depth = most, 100_000, 32

    def take(self, depth: int) -> bool:
        """Whether one more part may be read, at this depth."""
        self._left -= 1
        return self._left >= 0 and depth <= self._depth

    def listed(self, schema: JsonMapping) -> Sequence[object] | None:
        """The values that a schema lists; None if it lists none, or they are beyond the limit."""
        choices = listed(schema)
        self._values -= len(choices or ())
        return choices if self._values >= 0 else None


def kind(value: object) -> str:
    """The type of a JSON value; a whole number is an "integer"."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def kinds(schema: object, whole: object, steps: Steps | None = None, depth: int = 0) -> frozenset[str]:
    """Types that a schema may allow. whole: the schema in which references are looked up."""
    steps = steps or Steps()
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or not steps.take(depth):
        return KINDS
    found = _named(schema)
    if (choices := steps.listed(schema)) is not None:
        found &= frozenset(map(kind, choices))
    for branches, all_of in branches_of(schema, whole):
        each = [kinds(branch, whole, steps, depth + 1) for branch in branches]
        found &= reduce(and_ if all_of else or_, each)
    return found | {"null"} if schema.get("nullable") is True else found  # OpenAPI's


def fits(value: object, schema: object, whole: object, steps: Steps | None = None, depth: int = 0) -> bool:
    """Whether types and lists of values of a schema allow a value."""
    steps = steps or Steps()
    if not isinstance(schema, Mapping) or not steps.take(depth):
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    own, choices = kind(value), steps.listed(schema)
    if own not in _named(schema):
        return False
    if choices is not None and not any(value == c and own == kind(c) for c in choices):
        return False
    return all(
        (all if all_of else any)(fits(value, branch, whole, steps, depth + 1) for branch in branches)
        for branches, all_of in branches_of(schema, whole)
    )


def _named(schema: JsonMapping) -> frozenset[str]:
    """Types that ``type`` names."""
    types = schema.get("type")
    if not isinstance(types, str | list | tuple):
        return KINDS
    named = frozenset([types] if isinstance(types, str) else [t for t in types if isinstance(t, str)])
    return KINDS & (named | {"integer"} if "number" in named else named)


def listed(schema: JsonMapping) -> Sequence[object] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list | tuple) else None


def branches_of(schema: JsonMapping, whole: object) -> Iterator[tuple[Sequence[object], bool]]:
    """Groups of further schemas of a value, and whether it must fit all schemas of the group, or any one."""
    if isinstance(reference := schema.get("$ref"), str):
        target = referred(whole, reference)
        yield [{} if target is None else target], True
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(key), list | tuple) and branches:
            yield branches, key == "allOf"


def as_json(text: str) -> str | None:
    """The text as Python writes this JSON; None for a text that is not JSON.

    A half of a character stays an escape, as UTF-8 cannot hold it.
    """
    try:
        value = json.loads(text)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return found if _is_whole(found) else json.dumps(value)
    except (ValueError, RecursionError):
        return None


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_string(text: str) -> str:
    """Turns a text into a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class Value:
    """Turns a value that grows into JSON. A string is sent while it grows, any other value at its end."""

    def __init__(self, schema: object, whole: object, says: str | None = None) -> None:
        """says: the mark in the model's tag: "true" for text, "false" for JSON; None: there is no mark."""
        self._schema, self._whole, self._says = schema, whole, says
        self._kinds = frozenset({"string"}) if says == "true" else kinds(schema, whole)
        self._held: list[str] = []
        self._begun = ""  # stands for the text held, as ``_core`` does
        self._is_text = False
        self._is_json = "string" not in self._kinds  # whatever follows

    def grow(self, text: str) -> str:
        """Take text; return the text that may be sent."""
        if self._is_text:
            return as_string(text)[1:-1]
        self._held.append(text)
        if self._is_json:
            return ""
        self._begun = _core(self._begun + text)
        sign = self._begun.lstrip()[:1]
        quoted = self._says == "false" and sign in ('"', "")  # perhaps a string of JSON
        if quoted or not _is_text(self._begun, self._kinds):
            self._is_json = sign != "" and sign in '[{"'
            return ""
        self._is_text = True
        return as_string("".join(self._held))[:-1]

    def end(self, text: str) -> str:
        """Take the rest of the value; return the text that may be sent."""
        if self._is_text:
            return as_string(text)[1:]
        return self._read("".join([*self._held, text]))

    def cut(self) -> str:
        """The text to be sent where the output ends within the value; "" if that may be text or JSON."""
        return "" if self._is_text or "string" in self._kinds else "".join(self._held)

    def _read(self, text: str) -> str:
        found = as_json(text)
        if found is None:
            return as_string(text)
        value = json.loads(found)
        own = kind(value)
        if self._says == "false" and own == "string":
            return found
        allowed = self._kinds - {"string"}
        if "string" not in self._kinds or (own in allowed and fits(value, self._schema, self._whole)):
            return found
        if own not in allowed or fits(text, self._schema, self._whole):
            return as_string(text)
        return found


def _core(begun: str) -> str:
    """The short text that decides as the beginning of a value does: white space and numbers are one sign."""
    text = begun.lstrip(_SPACE)
    bare = text.rstrip(_SPACE)
    if not bare.strip():
        return bare[:1]
    return (bare[0] if _is_number(bare) else bare) + text[len(bare) :][:1]


def _is_number(text: str) -> bool:
    """Whether a text may begin a number."""
    return text[0] in "-0123456789" and _NUMBER.issuperset(text)


def _is_text(begun: str, allowed: Collection[str]) -> bool:
    """Whether a value that begins so can only be a string, with these types allowed."""
    text = begun.strip(_SPACE)
    others = {*allowed} - {"string"}
    if "string" not in allowed or not others:
        return "string" in allowed
    if not text or any(w.startswith(text) for name in others for w in _LITERALS.get(name, ())):
        return False
    if text[0] in "[{":
        return {"[": "array", "{": "object"}[text[0]] not in others
    return not (_is_number(text) and others & {"integer", "number"})
