"""Arguments of calls as rules of a grammar: any object, or what a tool's schema allows."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mtp_jax.errors import RequestError
from mtp_jax.text.tools.formats import STRING, Format, Parameter, literals, parts
from mtp_jax.text.tools.rules import Rules, one_of
from mtp_jax.text.tools.text_schema import terminal, texts
from mtp_jax.text.tools.tool import Tool
from mtp_jax.text.tools.values import kinds

_BITS = 64  # of a rule's parameter in llguidance
# Keywords about all arguments together, which rules for each of them cannot keep to.
_TOGETHER = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "$ref")) | {
    "minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "dependencies", "dependentRequired", "dependentSchemas",
}  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")


def free(form: Format, rules: Rules) -> str:
    """Any object."""
    if form.parameter is None:
        return "json_object"
    pair = _Pair(form.parameter, rules)
    any_value = pair.value(pair.text([()], set()), "json_value" if pair.says_what else None)
    one = rules.add("pair", pair.of_any_key(rules.add("KEY", pair.key), any_value))
    return f"({one} ({pair.between} {one})*)?"


def held(form: Format, rules: Rules, tool: Tool, name: str) -> str:
    """What a tool's schema allows; if it is strict, also nothing that the schema does not name.

    name: of a rule that does not exist yet. Raises RequestError for what the format cannot keep to.
    """
    schema = tool.parameters
    if form.parameter is None:
        rules.charge(schema)
        return rules.json({"type": "object", **schema})
    if wrong := sorted(_TOGETHER & schema.keys()):
        raise RequestError(
            f"the schema of the tool {tool.name!r} has {wrong[0]!r}: this model writes each parameter by "
            "itself, so a schema of all together cannot be kept to; leave it out, or do not force the call"
        )
    rules.charge({key: value for key, value in schema.items() if key not in _DEFINITIONS})
    return _Held(_Pair(form.parameter, rules), rules, tool).write(name)


class _Pair:
    """How one argument is written.

    Attributes:
        key: a terminal, any key: none holds the sign that follows it.
        says_what: whether it says of a value whether it is text or JSON.
    """

    def __init__(self, parameter: Parameter, rules: Rules) -> None:
        self._rules, self._before = rules, rules.declared(parameter.before_key)
        self._after_key, *self._before_value = parts(parameter.before_value)
        self.stop, self.between = literals(parameter.end)[0], rules.declared(parameter.between)
        self._end = rules.declared(parameter.end.removeprefix(self.stop))
        self.says_what = STRING in self._before_value
        self.key = f"/[^{self._after_key[0]}]+/"

    def of_key(self, key: str, value: str) -> str:
        """The argument of this key."""
        if self._after_key in key:
            raise RequestError(
                f"this model cannot write a parameter named {key!r:.40}: it holds {self._after_key!r}"
            )
        return f"{self._before} {self._rules.then(key, self._after_key)} {value} {self._end}"

    def of_any_key(self, terminal: str, value: str) -> str:
        """Any argument whose key is this terminal."""
        return f"{self._before} {self._rules.up_to(self._after_key, terminal)} {value} {self._end}"

    def value(self, text: str | None, as_json: str | None) -> str:
        """A value that is text, up to its end, or JSON, with what says so."""
        ways = {"true": text, "false": as_json and f"{as_json} {self._rules.literal(self.stop)}"}
        between = (
            (
                way,
                " ".join(self._rules.declared(part.replace(STRING, is_text)) for part in self._before_value),
            )
            for is_text, way in ways.items()
            if way is not None
        )
        return one_of(f"{before} {way}" for way, before in between)

    def text(self, allowed: list[tuple[str, ...]], others: set[str]) -> str | None:
        """Text that fits what is allowed (see ``texts``), beside values of other types, with its end."""
        if () in allowed or not allowed:
            return self._rules.up_to(self.stop) if allowed else None
        wrong = [t for each in allowed for t in each if t.startswith('"') and self.stop in json.loads(t)]
        if wrong:
            raise RequestError(
                f"this model cannot write the value {wrong[0]}: it holds {self.stop!r}; change it"
            )
        but = []
        if self._rules.token(self.stop) is None:
            but.append(terminal(f"(?s:.*){re.escape(self.stop)}(?s:.*)"))
        if not self.says_what and others & {"array", "object"}:  # what begins so is JSON
            but.append(terminal(r"[\[{](?s:.*)"))
        ways = (" & ".join([*each, *(f"~{no}" for no in but)]) for each in allowed)
        return self._rules.up_to(self.stop, self._rules.add("T", " | ".join(ways)))


class _Held:
    """The arguments of one tool, each by itself, in any order."""

    def __init__(self, pair: _Pair, rules: Rules, tool: Tool) -> None:
        self._pair, self._rules, self._tool, self._whole = pair, rules, tool, tool.parameters
        self._values: dict[str, str | None] = {}

    def write(self, name: str) -> str:
        """Write a rule whose parameter has a bit for each argument, set once it is there; what uses it."""
        others = False if self._tool.strict else self._whole.get("additionalProperties", True)
        required = list(dict.fromkeys(self._whole.get("required", ())))
        if len(required) > _BITS:
            raise RequestError(
                f"the tool {self._tool.name!r} requires more than {_BITS} parameters; require fewer"
            )
        known = {**dict.fromkeys(required, others), **self._whole.get("properties", {})}
        end = f'""{f" %if is_ones([0:{len(required)}])" if required else ""}'
        first, more = ([] if required else ['""']), [end]

        def add(pair: str, after: str, bits: int, unless: str) -> None:
            one = self._rules.add("pair", pair)
            first.append(f"{one} {name}::{bits:#x}")
            more.append(f"{self._pair.between} {one} {name}::{after}{unless}")

        for bit, (key, schema) in enumerate(known.items()):  # those that are required come first
            value = self._value(key, schema)
            if value is None and key in required:
                raise RequestError(
                    f"the tool {self._tool.name!r} requires {key!r:.40}, of which no value is allowed"
                )
            if value is not None and bit < _BITS:
                add(self._pair.of_key(key, value), f"set_bit({bit})", 1 << bit, f" %if bit_clear({bit})")
            elif value is not None:
                add(self._pair.of_key(key, value), "_", 0, "")
        if others is not False and (value := self._value("", others)) is not None:
            key = self._pair.key
            if known:
                key += f" & ~{self._rules.add('KNOWN', ' | '.join(map(json.dumps, known)))}"
            add(self._pair.of_any_key(self._rules.add("KEY", key), value), "_", 0, "")
        if len(first) == (not required):
            return '""'
        self._rules.name(f"{name}::_", " | ".join(more))
        return one_of(first)

    def _value(self, key: str, schema: Any) -> str | None:
        """None where a schema allows no value."""
        same = json.dumps(schema)
        if same not in self._values:
            try:
                self._values[same] = self._written(schema)
            except RequestError as e:
                raise RequestError(f"the parameter {key!r:.40} of the tool {self._tool.name!r}: {e}") from e
        return self._values[same]

    def _written(self, schema: Any) -> str | None:
        allowed, others = texts(schema, self._whole), {*kinds(schema, self._whole)} - {"string"}
        text = self._pair.text(allowed, others)
        # Where nothing says what a value is, any text holds all JSON.
        as_json = (
            None if () in allowed and not self._pair.says_what else self._json(schema, allowed != [], others)
        )
        return self._pair.value(text, as_json) if text or as_json else None

    def _json(self, schema: Any, or_text: bool, kinds: set[str]) -> str | None:
        """JSON of these types; or_text: the schema allows strings, too, which are written otherwise."""
        if not kinds:
            return None
        own = schema if isinstance(schema, Mapping) else {}
        if or_text:
            own = {"allOf": [own, {"type": sorted(kinds)}]}
        return self._rules.json({**own, **self._definitions(schema)})

    def _definitions(self, schema: Any) -> dict[str, dict[str, Any]]:
        """What a schema refers to, and what that refers to, counted."""
        found: dict[str, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            for place, name in _references(waiting.pop()):
                known = self._whole.get(place, {})
                if name in known and name not in found.get(place, {}):
                    self._rules.charge(known[name])
                    found.setdefault(place, {})[name] = known[name]
                    waiting.append(known[name])
        return found


def _references(schema: Any) -> Iterator[tuple[str, str]]:
    """The definitions that a schema names."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            _, place, name, *_ = [*str(reference).split("/"), "", ""]
            if place in _DEFINITIONS:
                yield place, name.replace("~1", "/").replace("~0", "~")
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
