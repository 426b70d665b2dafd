"""Faults of an expression, found before there is a tokenizer."""

import re

from llguidance import LLMatcher

_REASON = re.compile(r"^error: (.*)$", re.MULTILINE)


def wrong_regex(text: str) -> str | None:
    """The fault of a regular expression in a few words; None if it has no fault."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(text))
    if not error:
        return None
    found = _REASON.search(error)
    return found[1] if found else error.splitlines()[0]
