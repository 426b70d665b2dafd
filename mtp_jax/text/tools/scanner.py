"""Compares a text that grows with the texts of a format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtp_jax.text.tools.formats import INDEX, NAME, NAMES, STRING, is_gap, parts

LONGEST = 256
"""Most characters of a name, a number or a gap; a longer text is none."""
_GAP = re.compile(r"\s*")
_IN_STRING = re.compile(r'["\\]')
_PLACES = {
    NAME: re.compile(NAMES),
    INDEX: re.compile(r"[0-9]+"),
    STRING: re.compile(r"true|false"),
}


@dataclass
class Found:
    """The match of a format's text with a text that grows.

    Attributes:
        length: number of characters that match; 0: more text must come to decide; -1: no match.
        groups: texts in the places of the format's text.
    """

    length: int
    groups: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.length > 0


def match(declared: str, text: str, start: int = 0) -> Found:
    """The match of a format's text at ``start``."""
    at, groups = start, dict[str, str]()
    for part in parts(declared):
        place = _GAP if is_gap(part) else _PLACES.get(part)
        if place is None:
            if not text.startswith(part, at):
                return Found(0 if part.startswith(text[at:]) else -1)
            at += len(part)
            continue
        found = place.match(text, at, at + LONGEST)
        if found is None:
            begun = part == STRING and any(word.startswith(text[at:]) for word in ("true", "false"))
            return Found(0 if begun or at == len(text) else -1)
        at = found.end()
        if part in (NAME, INDEX) and at == len(text):
            return Found(0 if at - found.start() < LONGEST else -1)
        groups[part] = found[0]
    return Found(at - start, groups)


def match_any(declared: Sequence[str], text: str, start: int = 0) -> Found:
    """The match of one of a format's texts at ``start``, the longest."""
    return max((match(one, text, start) for one in declared), key=lambda found: found.length)


def first(tags: Sequence[str], text: str) -> tuple[int, str]:
    """The index of the first of these tags, and the tag. Without one: where a tag may begin, and ""."""
    at, tag = min(((at, t) for t in tags if (at := text.find(t)) >= 0), default=(len(text), ""))
    if not tag:
        at -= max(begun(t, text) for t in tags)
    return at, tag


def begun(tag: str, text: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def is_markup(text: str) -> bool:
    """Whether a text that begins as a tag does can only be a tag: signs alone may be text."""
    return any(character.isalnum() for character in text)


class Json:
    """Finds the end of a JSON value: the bracket that closes it, or, if the text is no JSON, a tag.

    Attributes:
        begun: whether the value has begun.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        """tags: texts that end the value outside of strings."""
        self._tags = tags
        self._signs = re.compile(f'[{re.escape("".join(tag[0] for tag in tags))}"{{}}\\[\\]]')
        self._depth, self._in_string = 0, False
        self.begun = False

    def scan(self, text: str) -> tuple[int, bool]:
        """Take text. Returns the number of its characters in the value, and whether the value ends there.

        A text that may be the beginning of a tag, or of an escape, is left until more is known.
        """
        at = 0
        while (found := (_IN_STRING if self._in_string else self._signs).search(text, at)) is not None:
            at, sign = found.start(), found[0]
            if sign == "\\" and at + 1 == len(text):
                return self._taken(at, False)
            if not self._in_string and any(t.startswith(text[at : at + len(t)]) for t in self._tags):
                return self._taken(at, any(text.startswith(t, at) for t in self._tags))
            if sign == '"':
                self._in_string = not self._in_string
            elif sign in "[{":
                self._depth += 1
            elif sign in "]}":
                self._depth -= 1
                if self._depth <= 0:  # below 0: it belongs to the text around the value
                    return self._taken(at + 1 + min(self._depth, 0), True)
            at += 2 if sign == "\\" else 1
        return self._taken(len(text), False)

    def _taken(self, length: int, ended: bool) -> tuple[int, bool]:
        self.begun |= length > 0
        return length, ended
