"""Arguments that the model writes as JSON text: the texts for custom tools in them, and objects."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from mtp_jax import CallArguments, CallBegin, JsonObject
from serve.answers.turn import Called, Piece
from serve.base.json_answer import as_json

_LONGEST_START = 4096  # characters before the text, which are a short key; a longer beginning has no text


class Inputs:
    """Turns growing arguments of custom tools' calls into their growing text. One object per completion."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._texts: dict[int, _FirstString] = {}

    def is_text(self, index: int) -> bool:
        """Whether a call that has begun is a call of a custom tool."""
        return index in self._texts

    def body(self, index: int, call: Called) -> JsonObject:
        """Render a whole call in OpenAI's shape."""
        if not self.is_text(index):
            return call.body
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Take pieces of a turn; return them with texts in place of the arguments of custom tools."""
        if not self._names:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin) and piece.name in self._names:
                self._texts[piece.index] = _FirstString()
            elif isinstance(piece, CallArguments) and piece.index in self._texts:
                piece = replace(piece, text=self._texts[piece.index].push(piece.text))
                if not piece.text:
                    continue
            found.append(piece)
        return found


class _FirstString:
    """The value of a growing JSON object's first member that is a string.

    An escape that JSON does not know stands for its own characters, as a model that writes it means them.
    """

    _BEFORE = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
    # An escape with too few digits may go on in the next text, unless another sign follows.
    _CHARACTERS = re.compile(
        r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*', re.DOTALL
    )
    _ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
    _HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # of a surrogate pair

    def __init__(self) -> None:
        self._held, self._inside, self._ended = "", False, False

    def push(self, text: str) -> str:
        """Take JSON text; return the new characters of the value."""
        if self._ended:
            return ""
        self._held += text
        if not self._inside:
            begun = self._BEFORE.match(self._held, 0, _LONGEST_START)
            if begun is None:
                self._end(len(self._held) >= _LONGEST_START)
                return ""
            self._inside, self._held = True, self._held[begun.end() :]
        match = self._CHARACTERS.match(self._held)
        end = match.end() if match else 0
        if not self._held.startswith('"', end) and (half := self._HALF.search(self._held, 0, end)):
            end = half.start()  # its other half may follow in the next text
        found, self._held = self._held[:end], self._held[end:]
        self._end(self._held.startswith('"'))
        # A half without its other half is no character.
        known = self._ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", found)
        decoded: str = json.loads(f'"{known}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _end(self, ends: bool) -> None:
        if ends:
            self._held, self._ended = "", True


def arguments(text: str) -> JsonObject | None:
    """Arguments as an object; None for a call that was cut or has other arguments."""
    try:
        found = json.loads(text)
        as_json(found)  # which nests less deep
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
