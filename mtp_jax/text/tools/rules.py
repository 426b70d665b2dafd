"""A grammar in llguidance's Lark syntax, while it is written."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_jax.errors import RequestError, SchemaError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.tools.formats import INDEX, as_written, is_gap, parts

_TAG = re.compile(r"(<[^<>\s]+>)")
# A run of white space has a limit, as a model at a loss writes white space for ever. LINES: before calls that
# must come at once, as templates write it. GAP: between tags, two line breaks and a short indent. SPACE: in
# any JSON, a line break and the indent of 15 levels. INDENT: between arguments that fit a schema, as in JSON
# of a schema. The number of a call has a limit, too.
_ALWAYS = r"""TEXT: /(.|\n)*/
GAP: /[ \t\r\n]{1,8}/
LINES: /\n{1,2}/
NUMBER: /[0-9]{1,6}/
SPACE: /[ \t\r\n]{1,64}/
INDENT: / |\r?\n[ \t]{0,20}/
json_object: "{" SPACE? (json_pair ("," SPACE? json_pair)*)? "}"
json_pair: JSON_STRING SPACE? ":" SPACE? json_value SPACE?
json_array: "[" SPACE? (json_value SPACE? ("," SPACE? json_value SPACE?)*)? "]"
json_value: json_object | json_array | JSON_STRING | JSON_NUMBER | "true" | "false" | "null"
JSON_STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
JSON_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"""


@dataclass(frozen=True)
class Vocabulary:
    """A model's special tokens, and the limits of schemas.

    Attributes:
        token: the id of a tag that was added to the vocabulary as a token of its own. A grammar may name no
            other token by its id: llguidance loses its place when a draft of such a token is refused.
        embed: checks a schema and writes it as JSON text.
        most: limit of the characters of all schemas.
        widened: gets the parts of schemas that have been left out.
    """

    token: Callable[[str], int | None]
    embed: Callable[[Any], str]
    most: int
    widened: list[SchemaError] = field(default_factory=list)


class Rules:
    """The rules and terminals of a grammar, always with TEXT, GAP (white space), json_object, json_value."""

    def __init__(self, vocabulary: Vocabulary, exact: bool) -> None:
        """exact: whether a model must write gaps as the renderer writes them."""
        self._vocabulary, self._left, self._exact = vocabulary, vocabulary.most, exact
        self._lines, self._names = [_ALWAYS], dict[str, str]()

    @property
    def text(self) -> str:
        """The grammar."""
        return "\n".join(self._lines)

    def name(self, name: str, body: str) -> None:
        """Add a rule that other rules refer to by this name."""
        self._lines.append(f"{name}: {body}")

    def add(self, prefix: str, body: str, options: str = "") -> str:
        """Add a rule with this body, or a terminal if the prefix is upper case; return its name."""
        key = f"{prefix}{options}: {body}"
        if key not in self._names:
            self._names[key] = f"{prefix}_{len(self._names)}"
            self.name(self._names[key] + options, body)
        return self._names[key]

    def charge(self, value: object) -> None:
        """Count the size of JSON, before a rule is made of it. Raises RequestError above the limit."""
        waiting = [value]
        while waiting:
            part = waiting.pop()
            self._left -= 2 + (len(part) if isinstance(part, str | list | tuple | Mapping) else 2)
            if self._left < 0:
                raise RequestError(
                    "the schemas of the tools make a grammar of more than "
                    f"{self._vocabulary.most} characters; give fewer tools, or simpler schemas"
                )
            if isinstance(part, Mapping):
                waiting += [*part.keys(), *part.values()]
            elif isinstance(part, list | tuple):
                waiting += part

    def json(self, schema: JsonMapping) -> str:
        """The rule for JSON that fits a schema, which has been charged. Raises RequestError."""
        return self.add("json", f"%json {self._vocabulary.embed(schema)}")

    def widen(self, fault: SchemaError) -> None:
        """Report a part of a schema that has been left out."""
        self._vocabulary.widened.append(fault)

    def token(self, tag: str) -> str | None:
        """The grammar's notation for a tag that is a special token; None for a tag that is text."""
        own = self._vocabulary.token(tag)
        return None if own is None else f"<[{own}]>"

    def literal(self, text: str) -> str:
        """The expression for a text, in which a tag that is a special token is written as that token."""
        found = filter(None, _TAG.split(text))
        return " ".join(self.token(part) or json.dumps(part) for part in found)

    def declared(self, text: str) -> str:
        """The expression for a text of a format, with gaps."""
        gap = (lambda part: self.literal(as_written(part))) if self._exact else (lambda _: "GAP?")
        return " ".join(
            gap(part) if is_gap(part) else "NUMBER" if part == INDEX else self.literal(part)
            for part in parts(text)
        )

    def then(self, text: str, tag: str) -> str:
        """The expression for this text and a tag behind it."""
        own = self.token(tag)
        return json.dumps(text + tag) if own is None else f"{json.dumps(text)} {own}" if text else own

    def up_to(self, tag: str, terminal: str = "TEXT") -> str:
        """The expression for text of a terminal and a tag behind it; the text ends at the first such tag."""
        own = self.token(tag)
        return (
            self.add("up", f"{terminal} {json.dumps(tag)}", "[lazy]") if own is None else f"{terminal} {own}"
        )


def one_of(ways: Iterable[str]) -> str:
    """The expression for any one of these alternatives."""
    return f"({' | '.join(ways)})"
