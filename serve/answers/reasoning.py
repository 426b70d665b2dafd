"""Splits a model's thoughts from its answer: ``<think>...</think>`` before the text."""

from collections.abc import Iterable

from mtp_jax import Tokenizer, ToolUse

OPEN, CLOSE = Tokenizer.OPEN_THOUGHT, Tokenizer.CLOSE_THOUGHT


def may_think(tokenizer: Tokenizer) -> bool:
    """Whether the model has a token that ends thoughts; elsewhere ``<think>`` is text like any other."""
    return tokenizer.backend.token_to_id(CLOSE) is not None


class Splitter:
    """Splits growing text without calls; tags are never shown. One object per completion."""

    def __init__(self, thinking: bool, may_think: bool) -> None:
        """thinking: whether the prompt has opened a thought. may_think: whether the output may open one."""
        self._tag = CLOSE if thinking else OPEN if may_think else ""
        self._thinking = thinking
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take text; return the new (thought, answer) that may be shown."""
        if not self._tag:
            return "", text
        text = self._held + text
        return self._before(text) if self._tag == OPEN else self._up_to_end(text)

    def flush(self) -> tuple[str, str]:
        """Return (thought, answer) of the text held back, at the end."""
        rest, self._held = self._held, ""
        return self._sides(rest)

    def call(self) -> tuple[str, str]:
        """Return the text held back, as a call begins, which ends a thought. A later end tag is not shown."""
        shown = self.flush()
        self._thinking, self._tag = False, CLOSE if self._tag == CLOSE else ""
        return shown

    def _sides(self, text: str) -> tuple[str, str]:
        return (text, "") if self._thinking else ("", text)

    def _before(self, text: str) -> tuple[str, str]:
        start = text.lstrip()
        if start.startswith(OPEN):
            self._thinking, self._tag, self._held = True, CLOSE, ""
            return self._up_to_end(start.removeprefix(OPEN))
        if OPEN.startswith(start):
            self._held = text
            return "", ""
        self._tag = self._held = ""
        return "", text

    def _up_to_end(self, text: str) -> tuple[str, str]:
        at = text.find(CLOSE)
        if at >= 0:
            thought, before = self._sides(text[:at])
            self._thinking, self._tag, self._held = False, "", ""
            return thought, before + text[at + len(CLOSE) :]
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - keep :]
        return self._sides(text[: len(text) - keep])


class ThoughtTokens:
    """Counts the tokens of a thought; an unended thought has all tokens. One object per completion.

    Attributes:
        count: tokens of the thought so far.
    """

    def __init__(self, tokenizer: Tokenizer, use: ToolUse | None) -> None:
        """use: the use of tools, whose calls end a thought, too."""
        ends = (CLOSE, *(use.form.opens if use else ()))
        self.count = 0
        self._tokenizer, self._tail, self._ended = tokenizer, b"", False
        self._ends = [end.encode() for end in ends]
        self._longest = max(map(len, self._ends))

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens."""
        for token in token_ids:
            if self._ended:
                return
            self.count += 1
            self._tail = self._tail[-self._longest :] + self._tokenizer.token_bytes(token, False)
            self._ended = any(end in self._tail for end in self._ends)
