"""Arguments of calls as rules of a grammar: any object, or the objects that a tool's schema allows."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from mtp_jax.errors import RequestError, SchemaError
from mtp_jax.json_object import JsonObject
from mtp_jax.text.enforceable import enforceable
from mtp_jax.text.references import referred
from mtp_jax.text.tools.formats import Format
from mtp_jax.text.tools.pairs import Member, Pair, Tags
from mtp_jax.text.tools.rules import Rules, one_of
from mtp_jax.text.tools.tool import Tool

_BITS = 64  # of a rule's parameter in llguidance
# Keywords that relate several arguments: rules for single arguments cannot enforce such a keyword.
_BRANCHES = frozenset(("allOf", "anyOf", "oneOf"))
_TOGETHER = _BRANCHES | {
    "not", "if", "then", "else", "enum", "const", "$ref", "nullable",
    "minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "dependencies", "dependentRequired", "dependentSchemas",
}  # fmt: skip
_APART = "cannot be enforced for all parameters together, of which this model writes each by itself"
_DEFINITIONS = ("$defs", "definitions")
# Keywords that only describe a value.
_SAID = frozenset(("title", "description", "default", "examples", "deprecated"))


def free(form: Format, rules: Rules, end: str) -> str:
    """The rule for arguments that need not fit a schema, any object, and for the end of the call behind."""
    if form.parameter is None:
        return f"json_object {end}"
    pair = Tags(form.parameter, rules)
    key = rules.add("KEY", pair.key)
    one = rules.add("pair", pair.of_any_key(key, pair.any_value()))
    any_object = f"({one} ({pair.between} {one})*)? {end}"
    if (last := pair.slipped({}, {}, form.end)) is None:
        return any_object
    return one_of([any_object, f"({one} {pair.between})* {pair.of_any_key(key, last)}"])


def held(form: Format, rules: Rules, tool: Tool, name: str, end: str) -> str:
    """The rule for arguments that a tool's schema allows, and for the end of the call behind.

    A strict tool allows only keys that it names. name: a name for a new rule. Raises SchemaError for a part
    of a strict tool's schema that rules of this format cannot enforce; the rules leave out that of any other.
    """
    schema = _inlined(json.loads(json.dumps(tool.parameters)))
    if form.parameter is not None:
        _take_apart(rules, tool, schema, _BRANCHES)
    for fault in enforceable(schema):
        _leave_out(rules, tool, *fault)
    if form.parameter is not None:
        _take_apart(rules, tool, schema, _TOGETHER)
    elif _TOGETHER & schema.keys():
        rules.charge(schema)
        return f"{rules.json({'type': 'object', **schema})} {end}"
    rules.charge({key: value for key, value in schema.items() if key not in _DEFINITIONS})
    pair = Member(rules) if form.parameter is None else Tags(form.parameter, rules)
    before, behind = pair.around
    tool = replace(tool, parameters=schema)
    return f"{before} {_Held(pair, rules, tool, f'{behind} {end}', form.end).write(name)}"


def _inlined(schema: JsonObject) -> JsonObject:
    """The schema, with that which it refers to written into it, where their keywords differ."""
    target = referred(schema, str(schema.get("$ref")))
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    if not isinstance(target, Mapping) or not target.keys() & rest.keys() <= _SAID:
        return schema
    return {**target, **rest}


def _take_apart(rules: Rules, tool: Tool, schema: JsonObject, keywords: Collection[str]) -> None:
    """Leave out keywords that relate the arguments."""
    for keyword in sorted(schema.keys() & keywords):
        _leave_out(rules, tool, (), keyword, _APART)
        del schema[keyword]


def _leave_out(rules: Rules, tool: Tool, place: Sequence[str], keyword: str, why: str) -> None:
    """Report a part of a tool's schema; raise SchemaError where that part must be kept to."""
    fault = SchemaError(place, keyword, why, tool.name)
    if tool.strict:
        raise fault
    rules.widen(fault)


class _Held:
    """Rules for the arguments of one tool, a rule for each argument, in any order."""

    def __init__(self, pair: Pair, rules: Rules, tool: Tool, end: str, text: str) -> None:
        """end: the rule for the text behind the last argument. text: the text that ends a call."""
        self._pair, self._rules, self._tool, self._whole = pair, rules, tool, tool.parameters
        self._end, self._end_text = rules.add("end", end), text
        self._values: dict[str, tuple[str | None, str | None]] = {}

    def write(self, name: str) -> str:
        """Write a rule whose parameter has a bit for each argument that is there. Returns the first rules."""
        others = False if self._tool.strict else self._whole.get("additionalProperties", True)
        required = list(dict.fromkeys(self._whole.get("required", ())))
        if len(required) > _BITS:
            _leave_out(
                self._rules,
                self._tool,
                (),
                "required",
                f"cannot be enforced for more than {_BITS} parameters",
            )
            del required[_BITS:]
        known = {**dict.fromkeys(required, others), **self._whole.get("properties", {})}
        ways = _Ways(self._rules, name, self._pair.between, self._end, len(required))
        for bit, (key, schema) in enumerate(known.items()):  # required keys come first
            pair = partial(self._pair.of_key, key)
            if not self._add(ways, pair, key, schema, bit) and key in required:
                _leave_out(
                    self._rules,
                    self._tool,
                    (),
                    "required",
                    f"names {key!r:.40}, of which no value is allowed",
                )
                self._add(ways, pair, key, {}, bit)
        if others is not False:
            self._add(ways, partial(self._of_other_key, known), "", others, _BITS)
        return ways.written() or self._end

    def _of_other_key(self, known: Collection[str], value: str) -> str:
        """The rule for an argument whose key the schema does not name."""
        key = self._pair.key
        if known:
            key += f" & ~{self._rules.add('KNOWN', ' | '.join(map(self._pair.spelt, known)))}"
        return self._pair.of_any_key(self._rules.add("KEY", key), value)

    def _add(self, ways: "_Ways", pair: Callable[[str], str], key: str, schema: object, bit: int) -> bool:
        """Add the ways to write one argument; return whether there are any.

        pair: turns the rule of a value into the rule of the argument.
        """
        if isinstance(schema, Mapping):
            schema = {name: value for name, value in schema.items() if name not in _SAID}
        same = json.dumps(schema)
        if same not in self._values:
            try:
                self._values[same] = self._rules_of(schema)
            except RequestError as e:
                place = ("properties", key) if key else ("additionalProperties",)
                inner = e if isinstance(e, SchemaError) else SchemaError((), "", str(e))
                _leave_out(self._rules, self._tool, (*place, *inner.place), inner.keyword, inner.why)
                self._values[same] = self._rules_of({})
        value, last = self._values[same]
        if value is None:
            return False
        ways.add(pair(value), bit)
        if last is not None:
            ways.add_last(pair(last), bit)
        return True

    def _rules_of(self, schema: object) -> tuple[str | None, str | None]:
        """The rules for a value: ``Pair.value`` and ``Pair.slipped``."""
        value = self._pair.value(schema, self._whole, self._json)
        return value, value and self._pair.slipped(schema, self._whole, self._end_text)

    def _json(self, schema: object, kinds: frozenset[str] | None) -> str:
        own = schema if isinstance(schema, Mapping) else {}
        if kinds is not None:
            own = {"allOf": [own, {"type": sorted(kinds)}]}
        return self._rules.json({**own, **self._definitions(schema)})

    def _definitions(self, schema: object) -> dict[str, JsonObject]:
        """Definitions that a schema refers to, directly or through other definitions; each is charged."""
        found: dict[str, JsonObject] = {}
        waiting = [schema]
        while waiting:
            for place, name in _references(waiting.pop()):
                known = self._whole.get(place, {})
                if name in known and name not in found.get(place, {}):
                    self._rules.charge(known[name])
                    found.setdefault(place, {})[name] = known[name]
                    waiting.append(known[name])
        return found


class _Ways:
    """The ways to go on, with an argument or the end, before the first argument and behind one.

    Behind one they are a rule whose parameter has a bit for each of the first arguments that is there. An
    argument without a bit, of number ``_BITS`` or more, may come again.
    """

    def __init__(self, rules: Rules, name: str, between: str, end: str, required: int) -> None:
        """name: the name of the rule. required: number of the first arguments, which must be there."""
        self._rules, self._name, self._between, self._required = rules, name, between, required
        self._ends = [] if required else [end]
        self._first, self._more = list[str](), [end + _given(required)]

    def add(self, pair: str, bit: int) -> None:
        """Add an argument, and the rule behind it."""
        one = self._rules.add("pair", pair)
        own = bit < _BITS
        self._first.append(f"{one} {self._name}::{1 << bit if own else 0:#x}")
        after, unless = (f"set_bit({bit})", f" %if bit_clear({bit})") if own else ("_", "")
        self._more.append(f"{self._between} {one} {self._name}::{after}{unless}")

    def add_last(self, pair: str, bit: int) -> None:
        """Add an argument that ends the call."""
        one = self._rules.add("last", pair)
        self._first += [one] if self._required <= (bit < self._required) else []
        self._more.append(f"{self._between} {one}{_given(self._required, bit)}")

    def written(self) -> str:
        """Write the rule; return the ways before the first argument, or "" where there is no argument."""
        if not self._first:
            return ""
        self._rules.name(f"{self._name}::_", " | ".join(self._more))
        return one_of([*self._ends, *self._first])


def _given(required: int, last: int = _BITS) -> str:
    """The condition that all required arguments but the last are there, and that the last is not."""
    held = [f"bit_clear({last})"] if last < _BITS else []
    held += [f"is_ones([{a}:{b}])" for a, b in ((0, min(last, required)), (last + 1, required)) if a < b]
    return f" %if {reduce('and({}, {})'.format, held)}" if held else ""


def _references(schema: object) -> Iterator[tuple[str, str]]:
    """The place and the name of each definition that a schema refers to."""
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
