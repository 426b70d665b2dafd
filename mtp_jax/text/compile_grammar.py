"""Compilation of a grammar for a vocabulary by llguidance, as a trial and the engine both do it."""

import functools
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Expressions that llguidance may derive, at first and for a token: a fifth and a tenth of its defaults.
# Repeats of tens of thousands need more, at first and for each mask.
_FUEL = 200_000
_STEP_FUEL = 20_000
# Tokens whose masks are made once, for all grammars that allow them together: text within strings. Two more
# sets of llguidance's own, white space and longer text, make a table a quarter dearer and no mask cheaper.
_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}')
_LONGEST_REASON = 300  # characters
_EXCERPT = re.compile(r"\n *\d+ \| ")  # begins a line of the grammar in an error


class _Wrapped:
    """A vocabulary as llguidance takes one from Python: names of attributes are llguidance's."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None
    special_token_ids = ()

    def __init__(self, tokens: Sequence[bytes], eos: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens, self.eos_token_id, self._encode = tokens, eos, encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


@dataclass(frozen=True)
class TokenTable:
    """Tokens that grammars are compiled for (``text/plain_text.py`` makes it of a tokenizer).

    Attributes:
        tokens: bytes of each id of the model [V]. ``tag`` stands for an id that no text has.
        eos: ids that end an output.
        encode: tokens of a text that a grammar leaves no choice about; None: at each place the longest, which
            may not be the tokens that the model writes.
    """

    tokens: Sequence[bytes]
    eos: Sequence[int]
    encode: Callable[[str], list[int]] | None = None

    @staticmethod
    def tag(token: int) -> bytes:
        """The entry of an id that no text has; a grammar gives it by its id."""
        return b"\xff<[%d]>" % token  # begins as llguidance's special tokens do, and as no UTF-8 does

    @functools.cached_property
    def compiled(self) -> LLTokenizer:
        """The table in llguidance's form, made while no other thread runs: 0.4 s for 128 K tokens."""

        def longest_first(text: str) -> list[int]:
            return found.greedy_tokenize(text)

        wrapped: Any = _Wrapped(self.tokens, self.eos[0], self.encode or longest_first)
        found = LLTokenizer(wrapped, eos_token=list(self.eos), slices=list(_SLICES))
        return found

    def build(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a grammar in llguidance's form; it may hold an error."""
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=_FUEL, step_lexer_fuel=_STEP_FUEL)
        matcher = LLMatcher(self.compiled, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return matcher
        # Some grammars prove empty, or too large, only at the first or second mask.
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        ahead = matcher.deep_copy()
        if allowed:
            ahead.consume_token((allowed & -allowed).bit_length() - 1)  # the first
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.compute_bitmask()
        return ahead if ahead.is_error() else matcher


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar in llguidance's form and a matcher at its beginning.

    Attributes:
        seconds: seconds of processor time that the compilation took.
        held: bytes of its memory, approximately.
    """

    grammar: str
    matcher: LLMatcher
    seconds: float
    held: int = 0

    @property
    def fault(self) -> str | None:
        """Why no output fits the grammar, in one line, without the text of its rules; None if one may."""
        if not self.matcher.is_error():
            return None
        reason = self.matcher.get_error().replace("<non-verbose/>", "")
        _, of_schema, fault = reason.partition("failed to compile JSON schema: ")
        reason = _EXCERPT.split(fault)[0] if of_schema else reason
        if reason.startswith("NoExtension"):
            return "no text the model can write fits it"
        return textwrap.shorten(reason, _LONGEST_REASON, placeholder=" ...")

    @classmethod
    def of(cls, table: TokenTable, grammar: str, held: int) -> "CompiledGrammar":
        """Compile a grammar in the caller's thread."""
        began = time.thread_time()
        matcher = table.build(grammar)
        return cls(grammar, matcher, time.thread_time() - began, held)
