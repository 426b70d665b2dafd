"""Values of messages: JSON, and the arrays that it describes.

    {"Move": [1, 0]}        a dataclass: its name and its fields
    {"int32": [2, 3]}       an array: its dtype and its shape; its elements come after the JSON

Nothing in a message is executed, and it can only make objects of classes that the receiver names.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_origin

import ml_dtypes
import numpy as np

from mtp_jax.wire.connection import Buffer, WireError

_MOST_AXES = 8  # no array has more
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
_ALL = [np.dtype(kind) for kind in (*_PLAIN, "float16", "float32", "float64", *_NARROW)]
_DTYPES = {d.name: d for d in _ALL}  # numbers, never objects


def encode(value: object) -> tuple[bytes, list[Buffer]]:
    """The JSON of a value, and the bytes of its arrays. Raises WireError for an array that has no numbers."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_described(value, arrays)).encode()
    return text, [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays]


def _described(value: object, arrays: list[np.ndarray]) -> object:
    if is_dataclass(value):
        own = [_described(getattr(value, f.name), arrays) for f in fields(value)]
        return {type(value).__name__: own}
    if isinstance(value, tuple):
        return [_described(v, arrays) for v in value]
    if not hasattr(value, "dtype"):
        return value
    array = np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise WireError("protocol", f"an array of {array.dtype} cannot be sent")
    arrays.append(array)
    return {array.dtype.name: array.shape}


def decode(text: Buffer, arrays: Buffer, kinds: Mapping[str, type]) -> object:
    """The value that ``encode`` was given; its arrays are parts of ``arrays``, read-only. Raises WireError.

    kinds: the dataclasses that may come, by name.
    """
    try:
        reader = _Reader(arrays, kinds)
        found = reader.value(json.loads(bytes(text)))
        if reader.at != len(arrays):
            raise ValueError(f"{len(arrays) - reader.at} bytes too many")
        return found
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        said = f"a message that cannot be read: {type(error).__name__}: {error}"
        raise WireError("protocol", said[:200]) from error


class _Reader:
    """Makes values of the objects of ``_described``. at: the place where the next array begins."""

    def __init__(self, arrays: Buffer, kinds: Mapping[str, type]) -> None:
        self.at, self._arrays, self._kinds = 0, memoryview(arrays).toreadonly(), kinds

    def value(self, given: object) -> object:
        if isinstance(given, list):
            return tuple(map(self.value, given))
        if not isinstance(given, dict):
            return given
        ((name, inside),) = given.items()
        if name in _DTYPES:
            return self._array(_DTYPES[name], inside)
        return _made(self._kinds[name], map(self.value, inside))

    def _array(self, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        if len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape}"[:80])
        count = math.prod(shape)
        if count * dtype.itemsize > len(self._arrays) - self.at:
            raise ValueError(f"{dtype.name} {shape} is longer than its message"[:120])
        begin, self.at = self.at, self.at + count * dtype.itemsize
        return np.frombuffer(self._arrays, dtype, count, begin).reshape(shape)


def _made(kind: type, values: Iterable[object]) -> object:
    """An object of a dataclass. Raises ValueError for a field of a wrong type, if its type can be asked."""
    given = tuple(values)
    for field, value in zip(fields(kind), given, strict=True):
        kind_of: Any = field.type
        askable = isinstance(kind_of, type | UnionType) and get_origin(kind_of) in (None, UnionType)
        if askable and not isinstance(value, kind_of):
            raise ValueError(f"{kind.__name__}.{field.name} = {value!r:.80}")
    return kind(*given)
