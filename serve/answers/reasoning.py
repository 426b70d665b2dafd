"""Thoughts of a model in an answer."""

from collections.abc import Iterable

from mtp_jax import Tokenizer, ToolUse


def may_think(tokenizer: Tokenizer) -> bool:
    """Whether the model has a token that ends thoughts; elsewhere ``<think>`` is text like any other."""
    return tokenizer.thoughts.may_open


class ThoughtTokens:
    """Counts the tokens of a thought; an unended thought has all tokens. One object per completion."""

    def __init__(self, tokenizer: Tokenizer, use: ToolUse | None, thinking: bool) -> None:
        """use: the use of tools, whose calls end a thought, too. thinking: whether the prompt opened it."""
        calls = use.form.opens if use else ()
        self._tokenizer, self._border = tokenizer, tokenizer.thoughts.ending_at(calls).border(thinking)

    @property
    def count(self) -> int:
        """Tokens of the thought so far, with its tags."""
        return self._border.count

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens."""
        for token in token_ids:
            self._border.push(self._tokenizer.decode_all([token]))
