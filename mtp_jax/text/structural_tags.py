"""Structural tags, as SGLang and vLLM take them from XGrammar: text in which tags hold JSON or expressions.

    {"format": {"type": "triggered_tags", "triggers": ["<f="],
                "tags": [{"begin": "<f=a>", "content": {"type": ...}, "end": "</f>"}]}}
    {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": ..., "end": "</f>"}]}  the older form

A tag that is a token of its own is written as that token.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tools.rules import Rules, Vocabulary, one_of

_T = TypeVar("_T")
_LONGEST = 8  # times the longest description: each element of "or" has the end of its tag
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_BEGINS = re.compile(r"<[^<>\s]+>")


def tag_grammar(wanted: JsonMapping, vocabulary: Vocabulary) -> str:
    """The grammar of an output, in llguidance's Lark syntax. Raises RequestError for another description."""
    given = dict(wanted)
    if "structures" in given:
        tags = [
            {
                "begin": _member(s, "begin", str),
                "content": {"type": "json_schema", "json_schema": _member(s, "schema", Mapping)},
                "end": _member(s, "end", str),
            }
            for s in _members(given, "structures", Mapping)
        ]
        given["format"] = {"type": "triggered_tags", "tags": tags, "triggers": given.get("triggers")}
    rules = Rules(vocabulary, exact=True)
    try:
        rules.name("start", _Formats(rules).of(_member(given, "format", Mapping), ""))
    except RecursionError:
        raise RequestError("structural_tag: formats are nested too deep; give fewer levels") from None
    if (length := len(rules.text)) > (most := _LONGEST * vocabulary.most):
        raise RequestError(
            f"structural_tag makes a grammar of {length} characters; at most {most} are allowed: give fewer "
            "elements, or a shorter end"
        )
    return rules.text


class _Formats:
    """Expressions for formats. Each is followed by ``end``, a text, which ends any text before it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        thoughts = [tag for text in (Thoughts.OPEN, Thoughts.CLOSE) if (tag := rules.token(text))]
        self._thoughts = f"(TEXT {one_of(thoughts)})*" if thoughts else ""
        self._kinds: Mapping[str, Callable[[JsonMapping, str], str]] = {
            "const_string": self._constant,
            "json_schema": self._json,
            "regex": self._regex,
            "any_text": lambda wanted, end: self._text(end),
            "sequence": self._sequence,
            "or": lambda wanted, end: one_of(self.of(e, end) for e in _members(wanted, "elements", Mapping)),
            "tag": lambda wanted, end: f"{self._tag(wanted)} {self._rules.literal(end)}",
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def of(self, wanted: JsonMapping, end: str) -> str:
        kind = _member(wanted, "type", str)
        if kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise RequestError(f"structural_tag: a format of the type {kind!r:.40}; expected one of {known}")
        return self._kinds[kind](wanted, end)

    def _constant(self, wanted: JsonMapping, end: str) -> str:
        return self._rules.literal(_member(wanted, "value", str) + end)

    def _json(self, wanted: JsonMapping, end: str) -> str:
        if wanted.get("style", "json") != "json":
            raise RequestError("structural_tag: the style of a json_schema must be json")
        return f"{self._rules.json(_member(wanted, 'json_schema', Mapping))} {self._rules.literal(end)}"

    def _regex(self, wanted: JsonMapping, end: str) -> str:
        pattern = _member(wanted, "pattern", str).replace("\n", "\\n")
        escaped = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern)
        return f"{self._rules.add('REGEX', f'/{escaped}/')} {self._rules.literal(end)}"

    def _text(self, end: str, before: str = "") -> str:
        """The expression for any text up to ``end``; where a token stands in that, text before it is free."""
        found = [(tag[0], tag.end()) for tag in _BEGINS.finditer(end) if self._rules.token(tag[0])]
        if found:
            (tag, at), *_ = found
            return f"{before} TEXT {self._rules.token(tag)} {self._rules.literal(end[at:])}"
        return f"{before} {self._rules.up_to(end)}" if end else f"{before} TEXT"

    def _sequence(self, wanted: JsonMapping, end: str) -> str:
        *first, last = _members(wanted, "elements", Mapping)
        if any(e.get("type") in ("any_text", "triggered_tags") for e in first):
            raise RequestError("structural_tag: any_text and triggered_tags must be the last of a sequence")
        return " ".join([*(self.of(e, "") for e in first), self.of(last, end)])

    def _tag(self, wanted: JsonMapping, skipped: int = 0) -> str:
        """The expression for a tag; ``skipped``: characters of its beginning that stand before it."""
        begin = self._rules.literal(_member(wanted, "begin", str)[skipped:])
        return f"{begin} {self.of(_member(wanted, 'content', Mapping), _member(wanted, 'end', str))}"

    def _any_of(self, tags: Iterable[str]) -> str:
        """The rule for any of these tags, by a name: tags within tags would double with each use of them."""
        return self._rules.add("tags", one_of(tags))

    def _triggered(self, wanted: JsonMapping, end: str) -> str:
        triggers, behind = _members(wanted, "triggers", str), dict[str, list[str]]()
        for tag in _members(wanted, "tags", Mapping):
            begin = _member(tag, "begin", str)
            trigger = next((t for t in triggers if t and begin.startswith(t)), None)
            if trigger is None:
                raise RequestError(f"structural_tag: the tag {begin!r:.60} begins with none of the triggers")
            token = _BEGINS.match(begin)
            if token and len(token[0]) > len(trigger) and self._rules.token(token[0]):
                trigger = token[0]  # a model writes the token, of which the trigger is no part
            behind.setdefault(trigger, []).append(self._tag(tag, len(trigger)))
        ways = {trigger: self._any_of(tags) for trigger, tags in behind.items()}
        at_once = one_of(f"{self._rules.literal(t)} {tags}" for t, tags in ways.items())
        later = one_of(f"{self._text(t, self._thoughts)} {tags}" for t, tags in ways.items())
        rest = self._text(end, self._thoughts)
        if _flag(wanted, "stop_after_first"):
            if _flag(wanted, "at_least_one"):
                return f"{at_once} {self._rules.literal(end)}"
            return one_of([f"{later} {self._rules.literal(end)}", rest])
        return f"{at_once if _flag(wanted, 'at_least_one') else ''} {later}* {rest}"

    def _separated(self, wanted: JsonMapping, end: str) -> str:
        tags = self._any_of(self._tag(tag) for tag in _members(wanted, "tags", Mapping))
        separator = self._rules.literal(_member(wanted, "separator", str))
        all_tags = tags if _flag(wanted, "stop_after_first") else f"{tags} ({separator} {tags})*"
        maybe = "" if _flag(wanted, "at_least_one") else "?"
        return f"({all_tags}){maybe} {self._rules.literal(end)}"


_NAMES = {str: "a string", Mapping: "an object", bool: "true or false", Sequence: "a list"}


def _member(wanted: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = wanted.get(name)
    if not isinstance(value, kind):
        raise RequestError(f"structural_tag: {name} = {value!r:.60}; expected {_NAMES[kind]}")
    return value


def _members(wanted: Mapping[str, Any], name: str, kind: type[_T]) -> Sequence[_T]:
    value = wanted.get(name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, kind) for v in value):
        raise RequestError(
            f"structural_tag: {name} = {value!r:.60}; expected a list of one or more, each {_NAMES[kind]}"
        )
    return value


def _flag(wanted: Mapping[str, Any], name: str) -> bool:
    return wanted.get(name) is not None and _member(wanted, name, bool)
