"""What may come next beside a grammar: words that must not appear, and thoughts that must end.

A rule says so by masks, as a grammar does, so that it holds at every position of a draft window: the verified
tokens are those of one token at a time, whatever was drafted.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from mtp_jax.text.grammar import WORD, Matcher


class TokenRule(Protocol):
    """What one output may go on with. It follows the tokens of the output so far."""

    def masks(self, drafts: Sequence[int], width: int) -> np.ndarray:
        """Allowed tokens uint32 [width, ceil(V / 32)], position i behind i drafts.

        Behind more tokens than ``drafts`` has, the masks are only hints for drafting.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        ...


class BadWords:
    """The output never holds one of these sequences of tokens."""

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """sequences: none is empty."""
        self._sequences = [tuple(s) for s in sequences]
        self._vocab_size = vocab_size
        # As many of the newest tokens as a sequence can have before its last one; no sequence, none.
        self._most = max(map(len, self._sequences), default=1) - 1
        self._tail: list[int] = []

    def masks(self, drafts: Sequence[int], width: int) -> np.ndarray:
        """See ``TokenRule``. Behind what is known nothing is left out."""
        masks = _everything(width, self._vocab_size)
        for i in range(min(len(drafts) + 1, width)):
            before = (*self._tail, *drafts[:i])
            for *start, last in self._sequences:
                if not start or before[-len(start) :] == tuple(start):
                    masks[i, last // WORD] &= ~np.uint32(1 << last % WORD)
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        both = [*self._tail, *tokens]
        self._tail = both[len(both) - min(self._most, len(both)) :]


class ThinkingBudget:
    """A thought has so many tokens at most: the next one is then its end.

    The tokens of the two tags do not count.
    """

    def __init__(self, most: int, opens: int | None, closes: int, thinking: bool, vocab_size: int) -> None:
        """opens, closes: tokens of the tags. thinking: whether the output begins inside a thought."""
        self._most, self._opens, self._closes = most, opens, closes
        self._vocab_size = vocab_size
        self._end = np.zeros(-(-vocab_size // WORD), np.uint32)
        self._end[closes // WORD] = 1 << closes % WORD
        self._left = most if thinking else None

    def _after(self, left: int | None, token: int) -> int | None:
        """Tokens that a thought may still have after one more; None outside of a thought."""
        if token == self._closes:
            return None
        if left is None:
            return self._most if token == self._opens else None
        return left - 1

    def masks(self, drafts: Sequence[int], width: int) -> np.ndarray:
        """See ``TokenRule``. A thought is taken to go on behind what is known, up to its end."""
        masks = _everything(width, self._vocab_size)
        left = self._left
        for i in range(width):
            if left == 0:
                masks[i] = self._end
            if i < len(drafts):
                left = self._after(left, drafts[i])
            elif left is not None:
                left = left - 1 if left else None
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens."""
        for token in tokens:
            self._left = self._after(self._left, token)


def bad_words(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The sequences of tokens that spell these words, as vLLM chooses them.

    Each as at the beginning of a text, and as after a space where that changes the first token alone. Other
    ways to spell a word are not found.
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
    """All that one output must obey on the way.

    Attributes:
        matcher: where the output stands in its grammar; None without one.
        rules: hold beside it.
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
        """Whether its grammar cannot say what may follow (see ``Matcher.failed``)."""
        return self.matcher is not None and self.matcher.failed


def _everything(width: int, vocab_size: int) -> np.ndarray:
    return np.full((width, -(-vocab_size // WORD)), 2**WORD - 1, np.uint32)
