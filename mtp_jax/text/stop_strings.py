"""Stop strings: the end of a stream of text, and the part that may be shown before the end is known."""

from collections.abc import Sequence

from mtp_jax.errors import RequestError
from mtp_jax.text.thoughts import Thoughts


class StopStrings:
    """Ends a stream of text at the first stop string to be completed, and shows no part of it before.

    To know which token ended the text (and how much cache is still valid), push token by token. Inside a
    thought only stop strings that hold its closing tag count.

    Raises:
        RequestError: a stop string is empty or not a string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        wrong = [stop for stop in self.stops if not isinstance(stop, str) or not stop]
        if wrong:
            raise RequestError(f"stop must be non-empty strings, got {wrong[0]!r}; remove it")
        self.matched: str | None = None
        self._include = include_stop
        self._held = ""
        self._thought = 0  # characters of the text held back that belong to a thought

    def push(self, text: str, may_stop: bool = True, inside: bool = False) -> tuple[str, bool]:
        """Take text; return (the part that may be shown, whether a stop string has been met).

        may_stop: whether a stop string may end in this text; it may have begun in earlier text. inside:
        whether the text belongs to a thought, in which none may begin.
        """
        if self.matched is not None:
            return "", True
        old, text = len(self._held), self._held + text
        if inside:
            self._thought = len(text)
        first_at = {s: 0 if Thoughts.CLOSE in s else self._thought for s in self.stops}
        if may_stop:
            found = [(text.find(s, max(old + 1 - len(s), at)), s) for s, at in first_at.items()]
            # The earliest end, and among equals the earliest start: it does not matter where the text was
            # cut.
            first = min(((at + len(s), at, s) for at, s in found if at >= 0), default=None)
            if first is not None:
                end, start, self.matched = first
                self._held = ""
                return text[: end if self._include else start], True
        shown = min((_begins(text, stop, at) for stop, at in first_at.items()), default=len(text))
        self._held, self._thought = text[shown:], max(self._thought - shown, 0)
        return text[:shown], False

    def flush(self) -> str:
        """End of the stream without a stop: the text held back so far."""
        rest, self._held = self._held, ""
        return rest


def _begins(text: str, stop: str, least: int) -> int:
    """The index, at least ``least``, of the suffix of ``text`` that may grow to ``stop``; else len(text)."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, least))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
