"""Where the thought of an output begins and ends: one notion for stop strings, budgets, grammars and answers.

A thought stands at the beginning of an output. The prompt has opened it, or the output does with its first
text; it ends at the first closing tag. Later tags are text of the answer. A model whose closing tag is no
token opens no thought by itself: there the tag is text like any other.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import tokenizers

_TAIL = 16  # tokens that suffice for the end of a prompt: a tag and white space


class OutputPart(Enum):
    """The part of an output that its text has reached.

    START: nothing but white space yet. CALLED: behind the begin of a call that stood in a thought; a closing
    tag may follow.
    """

    START = 0
    THOUGHT = 1
    CALLED = 2
    ANSWER = 3


class Place(NamedTuple):
    """A place in an output. held: text that may turn out to be a part of a tag."""

    part: OutputPart
    held: str = ""


class Thoughts:
    """The borders of one model's thoughts. Immutable: threads may share it.

    Attributes:
        OPEN, CLOSE: the tags.
        may_open: whether an output may open a thought itself.
    """

    OPEN: ClassVar = "<think>"
    CLOSE: ClassVar = "</think>"

    def __init__(
        self, may_open: bool, ends: Sequence[str] = (), added: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """ends: tags that end a thought, too, as tags of calls do. added: the model's added tokens by id."""
        self.may_open, self._ends, self._added = may_open, (self.CLOSE, *ends), added

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "Thoughts":
        """The borders for the model of a tokenizer."""
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        return cls(backend.token_to_id(cls.CLOSE) is not None, (), added)

    def ending_at(self, ends: Sequence[str]) -> "Thoughts":
        """The same borders, where these tags end a thought, too."""
        return Thoughts(self.may_open, ends, self._added)

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether a prompt ends with the opening tag, so that the output begins inside a thought."""
        return prompt.rstrip().endswith(cls.OPEN)

    def open_after(self, prompt: Sequence[int], decode: Callable[[list[int]], str]) -> bool:
        """Whether an output that follows a prompt begins inside a thought. decode: shows special tokens, too.

        The prompt ends with the opening tag, or with a turn that the tag begins and text goes on with: no
        added token follows it, and white space alone is between it and the token that begins the turn.
        """
        if self.opened_by(decode(list(prompt[-_TAIL:]))):
            return True
        at = next((i for i in reversed(range(len(prompt))) if prompt[i] in self._added), None)
        if at is None or self._added[prompt[at]] != self.OPEN:
            return False
        start = at
        while start and at - start < _TAIL and prompt[start - 1] not in self._added:
            start -= 1
        begun = start == 0 or self._added.get(prompt[start - 1], "") not in ("", self.OPEN, self.CLOSE)
        return begun and not decode(list(prompt[start:at])).strip()

    @classmethod
    def terminal(cls) -> str:
        """The terminal of a thought in Lark's syntax: a closing tag in letters would end it for readers."""
        tag = re.escape(cls.CLOSE).replace("/", "\\/")
        return rf"/(.|\n)*/ & ~/(.|\n)*{tag}(.|\n)*/"

    def begin(self, inside: bool) -> Place:
        """The place before an output. inside: whether the prompt has opened a thought."""
        return Place(
            OutputPart.THOUGHT if inside else OutputPart.START if self.may_open else OutputPart.ANSWER
        )

    def push(self, place: Place, text: str) -> tuple[Place, str, str]:
        """Go on by a text; return the new place, and the (thought, answer) that is certain, without tags."""
        part, text = place.part, place.held + text
        if part is OutputPart.ANSWER:
            return place, "", text
        if part is OutputPart.START:
            begun = text.lstrip()
            if not begun.startswith(self.OPEN):
                waits = self.OPEN.startswith(begun)
                return (Place(part, text), "", "") if waits else (Place(OutputPart.ANSWER), "", text)
            part, text = OutputPart.THOUGHT, begun.removeprefix(self.OPEN)
        found = [(at, len(end)) for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            at, length = min(found)
            thought, answer = self._sides(part, text[:at])
            return Place(OutputPart.ANSWER), thought, answer + text[at + length :]
        held = max(_begun(end, text) for end in self._ends)
        shown = len(text) - held
        return Place(part, text[shown:]), *self._sides(part, text[:shown])

    def after(self, place: Place, text: str) -> Place:
        """The place behind a text, for a reader who needs no text back."""
        place, _, _ = self.push(place, text)
        return place._replace(held=place.held.lstrip()) if place.part is OutputPart.START else place

    def splitter(self, inside: bool) -> "Splitter":
        """A splitter of one output's text. inside: whether the prompt has opened a thought."""
        return Splitter(self, inside)

    def border(self, inside: bool) -> "Border":
        """A follower of one output's tokens. inside: whether the prompt has opened a thought."""
        return Border(self, inside)

    def rest(self, place: Place) -> tuple[str, str]:
        """The (thought, answer) of the text held back, at the end of an output."""
        return self._sides(place.part, place.held)

    @staticmethod
    def _sides(part: OutputPart, text: str) -> tuple[str, str]:
        return (text, "") if part is OutputPart.THOUGHT else ("", text)


def _begun(end: str, text: str) -> int:
    """The number of characters at the end of a text that may grow to a tag."""
    return next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)


class Splitter:
    """Splits growing text without calls; tags are never shown. One object per completion."""

    def __init__(self, thoughts: Thoughts, inside: bool) -> None:
        """inside: whether the prompt has opened a thought."""
        self._thoughts, self._place = thoughts, thoughts.begin(inside)
        self._space: list[str] = []  # white space before a thought, or an answer that has none

    def push(self, text: str) -> tuple[str, str]:
        """Take text; return the new (thought, answer) that may be shown."""
        if self._place.part is OutputPart.START and not self._place.held and not text.strip():
            self._space.append(text)
            return "", ""
        self._place, thought, answer = self._thoughts.push(self._place, self._begun(text))
        return thought, answer

    def _begun(self, text: str) -> str:
        """The text with the white space before it."""
        pieces, self._space = [*self._space, text], []
        return "".join(pieces)

    def flush(self) -> tuple[str, str]:
        """Return (thought, answer) of the text held back, at the end."""
        self._place = self._place._replace(held=self._begun(self._place.held))
        rest, self._place = self._thoughts.rest(self._place), self._place._replace(held="")
        return rest

    def call(self) -> tuple[str, str]:
        """Return the text held back, as a call begins, which ends a thought. A later end tag is not shown."""
        shown, part = self.flush(), self._place.part
        self._place = Place(
            OutputPart.CALLED if part in (OutputPart.THOUGHT, OutputPart.CALLED) else OutputPart.ANSWER
        )
        return shown


class Border:
    """Follows the tokens of one output up to the end of its thought.

    Attributes:
        count: number of tokens up to there, with the tokens of both tags; so far, or 0 without a thought.
    """

    def __init__(self, thoughts: Thoughts, inside: bool) -> None:
        """inside: whether the prompt has opened a thought."""
        self._thoughts, self._place = thoughts, thoughts.begin(inside)
        self._seen = self.count = 0

    @property
    def inside(self) -> bool:
        """Whether the next token belongs to the thought."""
        return self._place.part is OutputPart.THOUGHT

    def push(self, token: str, shown: str = "") -> tuple[str, str]:
        """Take a token's text; return the parts in the thought and behind it of the text ``shown`` for it."""
        was = self._place.part
        if was is OutputPart.ANSWER:
            return "", shown
        self._place, _, answer = self._thoughts.push(self._place, token)
        self._seen += 1
        if self.inside:
            self.count = self._seen
            return shown, ""
        self._place = self._thoughts.after(self._place, "")
        if was is not OutputPart.THOUGHT:
            return "", shown
        self.count = self._seen
        cut = max(len(shown) - len(answer), 0)
        return shown[:cut], shown[cut:]
