"""Compilation of a grammar for a vocabulary by llguidance, as a trial and the engine both do it."""

import functools
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mtp_jax.text.tools.formats import DSML

# Expressions that llguidance may derive, at first and for a token: a fifth and a tenth of its defaults.
# Repeats of tens of thousands need more, at first and for each mask.
_FUEL = 200_000
_STEP_FUEL = 20_000


def without_tags(tokenizer: str) -> str:
    """A tokenizer's JSON, changed so that it finds no special token in any text.

    llguidance has the tokenizer encode text that a grammar leaves no choice about. Where that spells a
    special token, or an added one in angle brackets, which llguidance takes for special, it would allow this
    token alone, and then refuse it. Such tokens get names here that no text holds; grammars give them by
    their ids. ``DSML`` is text here, as the tags that it stands in are.
    """
    whole = json.loads(tokenizer)
    mark, model = secrets.token_hex(8), whole["model"]
    vocab = model["vocab"]
    for added in whole["added_tokens"]:
        text = added["content"]
        if text == DSML:
            added["special"] = False
        elif added["special"] or (text.startswith("<") and text.endswith(">")):
            added["content"], added["special"] = mark + text, True
            if text in vocab:
                vocab[mark + text] = vocab.pop(text)
            if text == model.get("unk_token"):
                model["unk_token"] = mark + text
    return json.dumps(whole, ensure_ascii=False)


@dataclass(frozen=True)
class Vocabulary:
    """Texts and ids that grammars are compiled for: tokenizer, ids of the model, ids that end an output."""

    tokenizer: str
    size: int
    eos: Sequence[int]

    @functools.cached_property
    def tokens(self) -> LLTokenizer:
        """The vocabulary in llguidance's form."""
        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.eos))

    def build(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a grammar in llguidance's form; it may hold an error."""
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=_FUEL, step_lexer_fuel=_STEP_FUEL)
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return matcher
        # Some grammars prove empty, or too large, only at the first or second mask.
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ahead = matcher.deep_copy()
        if allowed.any():
            ahead.consume_token(int(allowed.argmax()))
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

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: str, held: int) -> "CompiledGrammar":
        """Compile a grammar in the caller's thread."""
        began = time.thread_time()
        matcher = vocabulary.build(grammar)
        return cls(grammar, matcher, time.thread_time() - began, held)
