"""Bodies of messages: a launch, or another message, as JSON, then its arrays as they lie in memory.

    uint32 bytes of JSON | {"Move": [1, 0]} | array | array ...

A dataclass is an object with its name and fields, an array one with its dtype and shape. Nothing in a body is
executed, and only the classes of the log are made.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_origin

import ml_dtypes
import numpy as np

from mtp_jax.decode.host import Chunk, SamplingState, SlotRow
from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey, Topology
from mtp_jax.decode.launches import Launch
from mtp_jax.hosts.messages import LogError, Message

_SIZE = struct.Struct("<I")
# Bounds for damaged messages: JSON takes a few hundred bytes, and no array of the log has eight axes.
_MOST_JSON = 1 << 20
_MOST_AXES = 8
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
_ALL = [np.dtype(kind) for kind in (*_PLAIN, "float16", "float32", "float64", *_NARROW)]
_DTYPES = {d.name: d for d in _ALL}  # what an array may be: no objects
_PARTS = (SlotRow, SamplingState, Chunk, StepKey, DraftKey, PageKey, SamplingMode, Topology)


def _kinds() -> dict[str, type]:
    return {k.__name__: k for k in (*Message.__subclasses__(), *Launch.__subclasses__(), *_PARTS)}


def encode(value: Any) -> bytes:
    """The body of a message. Raises LogError for arrays of another dtype than numbers."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_described(value, arrays)).encode()
    return b"".join([_SIZE.pack(len(head)), head, *(a.tobytes() for a in arrays)])


def _described(value: Any, arrays: list[np.ndarray]) -> Any:
    if is_dataclass(value):
        own = [_described(getattr(value, f.name), arrays) for f in fields(value)]
        return {type(value).__name__: own}
    if isinstance(value, tuple):
        return [_described(v, arrays) for v in value]
    if not hasattr(value, "dtype"):
        return value
    array = np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise LogError(f"an array of {array.dtype} cannot be sent")
    arrays.append(array)
    return {array.dtype.name: array.shape}


def decode(body: bytes | bytearray) -> Any:
    """What ``encode`` was given; arrays are read-only. Raises LogError."""
    try:
        view = memoryview(body)
        (size,) = _SIZE.unpack_from(view)
        if size > min(_MOST_JSON, len(view) - _SIZE.size):
            raise ValueError(f"{size} bytes of JSON")
        reader = _Reader(view, _SIZE.size + size)
        found = reader.value(json.loads(bytes(view[_SIZE.size : reader.at])))
        if reader.at != len(view):
            raise ValueError(f"{len(view) - reader.at} bytes too many")
        return found
    except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise LogError(f"a message that cannot be read: {type(error).__name__}: {error}"[:200]) from error


class _Reader:
    """Makes values of what ``_described`` gave. at: where the next array begins."""

    def __init__(self, body: memoryview, at: int) -> None:
        self.at, self._body, self._kinds = at, body, _kinds()

    def value(self, given: Any) -> Any:
        if isinstance(given, list):
            return tuple(map(self.value, given))
        if not isinstance(given, dict):
            return given
        ((name, inside),) = given.items()
        if name in _DTYPES:
            return self._array(_DTYPES[name], inside)
        return _made(self._kinds[name], map(self.value, inside))

    def _array(self, dtype: np.dtype, shape: Any) -> np.ndarray:
        if len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape}"[:80])
        count = math.prod(shape)
        if count * dtype.itemsize > len(self._body) - self.at:
            raise ValueError(f"{dtype.name} {shape} is longer than its message"[:120])
        begin, self.at = self.at, self.at + count * dtype.itemsize
        return np.frombuffer(self._body, dtype, count, begin).reshape(shape)


def _made(kind: type, values: Iterable[Any]) -> Any:
    """A value of this class, whose fields are what it declares, as far as that can be asked."""
    given = tuple(values)
    for field, value in zip(fields(kind), given, strict=True):
        kind_of: Any = field.type
        askable = isinstance(kind_of, type | UnionType) and get_origin(kind_of) in (None, UnionType)
        if askable and not isinstance(value, kind_of):
            raise ValueError(f"{kind.__name__}.{field.name} = {value!r:.80}")
    return kind(*given)
