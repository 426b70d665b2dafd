"""Rules beside a grammar for the next token: words that must not appear, and thoughts that must end.

A rule makes masks, as a grammar does, so it holds at every position of a draft window: any drafts give the
tokens that decoding one token at a time gives.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from mtp_jax.text.grammar import WORD, Matcher
from mtp_jax.text.thoughts import OutputPart, Place, Thoughts


class TokenRule(Protocol):
    """Tokens with which one output may go on. It follows the tokens of the output so far."""

    def narrow(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Take tokens out of the allowed tokens, uint32 [width, ceil(V / 32)], in place.

        Position i is behind i drafts. Masks past the end of ``drafts`` are only hints for drafting.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        ...


class BadWords:
    """The output never holds one of these sequences of tokens.

    An automaton (Aho and Corasick, CACM 18 (1975), 333) knows which parts of which sequences the output ends
    in, so that a step takes the same time for any number and length of them. Its states are the sequences
    without their last tokens, and the beginnings of these.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """sequences: the forbidden sequences, none of them empty."""
        self._next: dict[tuple[int, int], int] = {}  # next state, by state and token
        self._last: dict[int, set[int]] = {}  # by state, tokens that would complete a sequence
        depths = [0]
        for *start, last in sequences:
            state = 0
            for depth, token in enumerate(start, 1):
                state = self._next.setdefault((state, token), len(depths))
                if state == len(depths):
                    depths.append(depth)
            self._last.setdefault(state, set()).add(last)
        self._else = [0] * len(depths)  # for each state the longest other state that is its suffix
        for (state, token), after in sorted(self._next.items(), key=lambda item: depths[item[1]]):
            shorter = self._after(self._else[state], token) if state else 0
            self._else[after] = shorter
            if shorter and shorter in self._last:  # tokens of state 0 follow all states
                self._last[after] = self._last.get(after, set()) | self._last[shorter]
        self._state = 0

    def _after(self, state: int, token: int) -> int:
        while (after := self._next.get((state, token))) is None and state:
            state = self._else[state]
        return after or 0

    def narrow(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """See ``TokenRule``. Masks past the known tokens stay unchanged."""
        state = self._state
        for i in range(min(len(drafts) + 1, len(masks))):
            for last in {*self._last.get(0, ()), *self._last.get(state, ())}:
                masks[i, last // WORD] &= ~np.uint32(1 << last % WORD)
            if i < len(drafts):
                state = self._after(state, drafts[i])

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        for token in tokens:
            self._state = self._after(self._state, token)


class ThinkingBudget:
    """A thought has at most ``most`` tokens: then its end is forced, as soon as a grammar allows it.

    The tokens of the two tags do not count. A grammar does not allow the end within a call of a tool, which
    some models write inside a thought.
    """

    def __init__(
        self, most: int, closes: int, thoughts: Thoughts, inside: bool, text: Callable[[int], str]
    ) -> None:
        """closes: the closing tag. inside: whether the output begins in a thought. text: reads a token."""
        self._closes, self._thoughts, self._text = closes, thoughts, text
        self._place, self._left = thoughts.begin(inside), most

    def _after(self, place: Place, left: int, token: int) -> tuple[Place, int]:
        """The place behind a token, and the number of tokens that a thought may have from there on."""
        if place.part is OutputPart.ANSWER:
            return place, left
        then = self._thoughts.after(place, self._text(token))
        inside = place.part is then.part is OutputPart.THOUGHT
        return then, max(left - 1, 0) if inside else left

    def narrow(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """See ``TokenRule``. A thought is assumed to go on past the known tokens, up to its end."""
        place, left, (word, bit) = self._place, self._left, divmod(self._closes, WORD)
        for i in range(len(masks)):
            inside = place.part is OutputPart.THOUGHT
            if inside and left == 0 and masks[i, word] >> np.uint32(bit) & 1:
                masks[i] = 0
                masks[i, word] = 1 << bit
            if i < len(drafts):
                place, left = self._after(place, left, drafts[i])
            elif inside:
                place, left = (place, left - 1) if left else (Place(OutputPart.ANSWER), left)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        for token in tokens:
            self._place, self._left = self._after(self._place, self._left, token)


def bad_words(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The sequences of tokens that spell these words, as vLLM chooses them.

    Each word is spelt as at the beginning of a text, and as after a space if that changes only the first
    token. Other ways to spell a word are not found.
    """
    found = []
    for word in words:
        bare = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        found.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found.append(spaced)
    return [ids for ids in found if ids]


class Constraints:
    """The constraints of one output, at its present state.

    Attributes:
        matcher: the output's position in its grammar; None without a grammar.
        rules: rules beside the grammar.
    """

    def __init__(self, matcher: Matcher | None, rules: Sequence[TokenRule] = ()) -> None:
        self.matcher, self.rules = matcher, rules

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens, up to but not including one that ended the output."""
        if self.matcher:
            self.matcher.advance(tokens)
        for rule in self.rules:
            rule.advance(tokens)

    @property
    def failed(self) -> bool:
        """Whether its grammar has failed, so that no token can follow (see ``Matcher.failed``)."""
        return self.matcher is not None and self.matcher.failed
