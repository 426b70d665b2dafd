"""Rules for one argument of a call, which stands in tags of its own or is a member of a JSON object."""

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from mtp_jax.errors import RequestError
from mtp_jax.text.tools.formats import STRING, Parameter, literals, parts, slips
from mtp_jax.text.tools.rules import Rules, one_of
from mtp_jax.text.tools.text_schema import Texts, terminal, texts
from mtp_jax.text.tools.values import kinds

AsJson = Callable[[Any, frozenset[str] | None], str]
"""The rule for JSON that fits a schema and has one of these types; None: any type."""


class Pair(Protocol):
    """The rules for one argument in some notation.

    Attributes:
        key: the terminal of any key; a key never contains the sign that follows keys.
        between: rules for the text between two arguments.
        around: rules for the text before the first argument, and behind the last.
    """

    key: str
    between: str
    around: tuple[str, str]

    def spelt(self, key: str) -> str:
        """The terminal of this key, which ``key`` matches, too."""
        ...

    def of_key(self, key: str, value: str) -> str:
        """The rule for an argument with this key. Raises RequestError for a key that cannot be written."""
        ...

    def of_any_key(self, terminal: str, value: str) -> str:
        """The rule for an argument whose key matches this terminal."""
        ...

    def value(self, schema: object, whole: object, as_json: AsJson) -> str | None:
        """The rule for a value that fits a schema, and for its end; None where no value fits.

        whole: the schema in which references are looked up.
        """
        ...

    def slipped(self, schema: object, whole: object, end: str) -> str | None:
        """The rule for a text that ends by its tag without the mark, right before the end of the call.

        end: text that ends a call; the rule holds it, too. None where no such text fits, or in a format
        without a mark.
        """
        ...


class Member:
    """The notation of a JSON object: ``"key": value``."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self.key = rules, r'/"[^"\\\x00-\x1f]*"/'
        self.around, self.between = ('"{" INDENT?', 'INDENT? "}"'), 'INDENT? "," INDENT?'

    def spelt(self, key: str) -> str:
        """Turns the key into a terminal, as a JSON string."""
        return json.dumps(json.dumps(key, ensure_ascii=False))

    def of_key(self, key: str, value: str) -> str:
        """See ``Pair``."""
        return self.of_any_key(self.spelt(key), value)

    def of_any_key(self, terminal: str, value: str) -> str:
        """See ``Pair``."""
        return f'{terminal} INDENT? ":" INDENT? {value}'

    def value(self, schema: object, whole: object, as_json: AsJson) -> str | None:
        """See ``Pair``."""
        return as_json(schema, None) if kinds(schema, whole) else None

    def slipped(self, schema: object, whole: object, end: str) -> str | None:
        """See ``Pair``."""
        del schema, whole, end
        return None


class Tags:
    """The notation in tags around a key and a value, which is JSON, or text without quotes."""

    def __init__(self, parameter: Parameter, rules: Rules) -> None:
        self._rules, self._before = rules, rules.declared(parameter.before_key)
        self._after_key, *self._before_value = parts(parameter.before_value)
        self._stop = literals(parameter.end)[0]
        self._end = rules.declared(parameter.end.removeprefix(self._stop))
        self._says_what = STRING in self._before_value  # whether a tag tells text from JSON
        self.around, self.between = ("", ""), rules.declared(parameter.between)
        self.key = f"/[^{self._after_key[0]}]+/"

    def spelt(self, key: str) -> str:
        """The terminal of the key as it is."""
        return json.dumps(key)

    def of_key(self, key: str, value: str) -> str:
        """See ``Pair``."""
        if self._after_key in key:
            raise RequestError(
                f"this model cannot write a parameter named {key!r:.40}: it holds {self._after_key!r}"
            )
        return f"{self._before} {self._rules.then(key, self._after_key)} {value} {self._end}"

    def of_any_key(self, terminal: str, value: str) -> str:
        """See ``Pair``."""
        return f"{self._before} {self._rules.up_to(self._after_key, terminal)} {value} {self._end}"

    def value(self, schema: object, whole: object, as_json: AsJson) -> str | None:
        """See ``Pair``."""
        allowed, others = texts(schema, whole), kinds(schema, whole) - {"string"}
        ways = {"true": self._text(allowed, others)} if allowed else {}
        if others and (self._says_what or () not in allowed):  # any text includes JSON, too
            json_rule = as_json(schema, others if allowed else None)
            ways["false"] = f"{json_rule} {one_of(map(self._rules.literal, slips(self._stop)))}"
        return one_of(f"{self._says(is_text)} {way}" for is_text, way in ways.items()) if ways else None

    def any_value(self) -> str:
        """The rule for any value."""
        return self.value({}, {}, lambda schema, kinds: "json_value") or ""

    def slipped(self, schema: object, whole: object, end: str) -> str | None:
        """See ``Pair``."""
        _, *slipped = slips(self._stop)
        if not slipped or not (allowed := texts(schema, whole)):
            return None
        ends = [tag for text in slips(end) for tag in literals(text)]
        tags = f"{json.dumps(slipped[0])} GAP? {one_of(map(json.dumps, ends))}"
        text = self._terminal(allowed, kinds(schema, whole) - {"string"})
        return f"{self._says('true')} {self._rules.add('up', f'{text} {tags}', '[lazy]')}"

    def _says(self, is_text: str) -> str:
        """The rule for the text between a key and a value."""
        return " ".join(self._rules.declared(part.replace(STRING, is_text)) for part in self._before_value)

    def _text(self, allowed: Texts, others: frozenset[str]) -> str:
        """The rule for the text of a string and for its end, where a value may have further types, too."""
        return self._rules.up_to(self._stop, self._terminal(allowed, others))

    def _terminal(self, allowed: Texts, others: frozenset[str]) -> str:
        """The terminal of these texts."""
        if () in allowed:
            return "TEXT"
        wrong = [t for each in allowed for t in each if t.startswith('"') and self._stop in json.loads(t)]
        if wrong:
            raise RequestError(
                f"this model cannot write the value {wrong[0]}: it holds {self._stop!r}; change it"
            )
        but = []
        if self._rules.token(self._stop) is None:
            but.append(terminal(f"(?s:.*){re.escape(self._stop)}(?s:.*)"))
        if not self._says_what and others & {"array", "object"}:  # a value that begins so is JSON
            but.append(terminal(r"[\[{](?s:.*)"))
        ways = (" & ".join([*each, *(f"~{no}" for no in but)]) for each in allowed)
        return self._rules.add("T", " | ".join(ways))
