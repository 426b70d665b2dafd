"""The texts of custom tools, out of the arguments that the model writes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from mtp_jax import CallArguments, CallBegin, JsonObject
from serve.answers.turn import Called, Piece


class Inputs:
    """Turns the arguments of custom tools' calls into their text, as it grows. One object per completion."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._texts: dict[int, _FirstString] = {}

    def is_text(self, index: int) -> bool:
        """Whether a call that has begun is one of a custom tool."""
        return index in self._texts

    def body(self, index: int, call: Called) -> JsonObject:
        """A whole call in OpenAI's shape."""
        if not self.is_text(index):
            return call.body
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Take the pieces of a turn; return the same with texts in the place of such arguments."""
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
    """The value of the first member of a JSON object that is a string, as its text comes."""

    _BEFORE = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
    _CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*', re.DOTALL)
    _HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # of a surrogate pair

    def __init__(self) -> None:
        self._held, self._inside = "", False

    def push(self, text: str) -> str:
        """Characters that are known now."""
        self._held += text
        if not self._inside:
            begun = self._BEFORE.match(self._held)
            if begun is None:
                return ""
            self._inside, self._held = True, self._held[begun.end() :]
        match = self._CHARACTERS.match(self._held)
        end = match.end() if match else 0
        if not self._held.startswith('"', end) and (half := self._HALF.search(self._held, 0, end)):
            end = half.start()  # its other half may come
        found, self._held = self._held[:end], self._held[end:]
        # A half without its other half is no character.
        decoded: str = json.loads(f'"{found}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
