"""The texts that a schema allows where a model writes strings without quotes and escapes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.string_formats import EXPRESSIONS
from mtp_jax.text.tools.values import Steps, branches_of, listed

Texts = list[tuple[str, ...]]
"""Alternatives: a text matches all terminals (of a Lark grammar) of at least one; (): any text."""

_ANY: Texts = [()]
_MOST = 256  # alternatives


def texts(schema: object, whole: object, steps: Steps | None = None, depth: int = 0) -> Texts:
    """The texts that a schema allows; [] where it allows no string.

    whole: the schema in which references are looked up. Raises RequestError for a schema that a grammar
    cannot enforce.
    """
    steps = steps or Steps()
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return _ANY
    if not steps.take(depth):
        raise RequestError("a schema refers to others too often, or to itself; spell out its strings")
    types = schema.get("type", "string")
    if types != "string" and "string" not in types:
        return []
    found = _ANY
    for ways in _demands(schema, whole, steps, depth):
        found = _both(found, ways)
    return found


def _demands(schema: JsonMapping, whole: object, steps: Steps, depth: int) -> Iterator[Texts]:
    """The texts that each part of a schema allows."""
    yield [tuple(_constraints(schema))]
    if (choices := listed(schema)) is not None:
        yield [(json.dumps(choice),) for choice in choices if isinstance(choice, str)]
    for branches, all_of in branches_of(schema, whole):
        each = [texts(branch, whole, steps, depth + 1) for branch in branches]
        yield from each if all_of else [[way for branch in each for way in branch]]


def _constraints(schema: JsonMapping) -> Iterable[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        yield f"/(?s:.){{{int(least)},{'' if most is None else int(most)}}}/"
    if "pattern" in schema:
        yield terminal(_search(schema["pattern"]))
    if (expression := EXPRESSIONS.get(schema.get("format", ""))) is not None:
        yield terminal(expression)


def _both(one: Sequence[tuple[str, ...]], other: Sequence[tuple[str, ...]]) -> Texts:
    """The texts that both allow."""
    if len(one) * len(other) > _MOST:
        raise RequestError(f"a schema allows strings in more than {_MOST} ways; simplify it")
    return [tuple(dict.fromkeys((*a, *b))) for a in one for b in other]


def _search(pattern: str) -> str:
    """The regular expression of a whole text that contains a match of the pattern."""
    before, after = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        pattern, before = pattern[1:], ""
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    if pattern.endswith("$") and escapes % 2 == 0:
        pattern, after = pattern[:-1], ""
    return f"{before}({pattern}){after}"


def terminal(expression: str) -> str:
    """Turns a regular expression into a terminal of a Lark grammar."""
    found, escaped = "", False
    for character in expression:
        found += {"/": "/" if escaped else "\\/", "\n": "n" if escaped else "\\n"}.get(character, character)
        escaped = character == "\\" and not escaped
    return f"/{found}/"
