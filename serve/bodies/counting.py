"""Sizes of a body that cost time: values in its text, before it is parsed; objects while it is checked."""

import numpy as np

from mtp_jax import JsonObject
from serve.base.errors import ApiError

# Each takes 4 to 8 us to check, on the event loop, where other requests wait meanwhile: 0.1 s at most.
MAX_OBJECTS = 12_000
_OBJECTS = "messages, parts, calls, tools or fields"
_FIELDS = 16  # number of unknown fields that take as long as one object
# An object of a conversation has three to six names; schemas of tools have the others.
MAX_NAMES = 10 * MAX_OBJECTS
MAX_VALUES = 2**21 + MAX_NAMES  # 2^20 tokens of a prompt, with a position each

_QUOTE = ord('"')
_MARKS = b'"[{:,'
_OTHERS = bytes({*range(256)} - {*_MARKS})


def check_text(text: bytes) -> None:
    """Raises ApiError for the text of more values than a request needs.

    Every value but the first follows a bracket or a comma, and every name has a colon.
    """
    if _too_many(_names(text), text.count(b",")) is None:  # marks within strings are counted, too
        return
    # Without escapes, every quote begins or ends a string.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    codes = np.frombuffer(marks, np.uint8)
    outside = codes[np.cumsum(codes == _QUOTE, dtype=np.uint8) % 2 == 0].tobytes()
    if error := _too_many(_names(outside), outside.count(b",")):
        raise error


def _names(text: bytes) -> int:
    return sum(text.count(mark) for mark in (b"[", b"{", b":"))


def _too_many(names: int, commas: int) -> ApiError | None:
    for found, kind, most in (
        (names, "names, lists and objects", MAX_NAMES),
        (names + commas, "values", MAX_VALUES),
    ):
        if found > most:
            return ApiError(
                413, f"the body has {found:,} {kind}; at most {most:,} are taken: send less at once"
            )
    return None


class Objects:
    """The objects of one body that have a class here, counted while they are checked."""

    def __init__(self) -> None:
        self._left = float(MAX_OBJECTS)

    def add(self, value: JsonObject, known: int) -> None:
        """Count an object. known: number of fields of its class. Raises ApiError where they are too many."""
        self._left -= 1 + max(0, len(value) - known) / _FIELDS
        if self._left < 0:
            raise ApiError(
                400, f"the body has more than {MAX_OBJECTS:,} {_OBJECTS}; send fewer, or join their texts"
            )
