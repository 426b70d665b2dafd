"""Stop strings: the end of a stream of text, and the part that may be shown before the end is known."""

from collections.abc import Sequence

from mtp_jax.errors import RequestError


class StopStrings:
    """Ends a stream of text at the first stop string to be completed, and shows no part of it before.

    To know which token ended the text (and how much cache is still valid), push token by token.

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

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Take text; return (the part that may be shown, whether a stop string has been met).

        may_stop: whether a stop string may end in this text; it may have begun in earlier text.
        """
        if self.matched is not None:
            return "", True
        old, text = len(self._held), self._held + text
        if may_stop:
            found = [(text.find(s, max(old + 1 - len(s), 0)), s) for s in self.stops]
            # The earliest end, and among equals the earliest start: it does not matter where the text was
            # cut.
            first = min(((at + len(s), at, s) for at, s in found if at >= 0), default=None)
            if first is not None:
                end, start, self.matched = first
                self._held = ""
                return text[: end if self._include else start], True
        shown = min((_begins(text, stop) for stop in self.stops), default=len(text))
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """End of the stream without a stop: the text held back so far."""
        rest, self._held = self._held, ""
        return rest


def _begins(text: str, stop: str) -> int:
    """The index of the suffix of ``text`` that may grow to ``stop``; len(text) if there is none."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
