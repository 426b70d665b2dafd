"""Bodies of messages: JSON fields, then arrays as they lie in memory. Nothing in them is executed.

    uint32 bytes of JSON | {"fields": {...}, "arrays": [[dtype, shape], ...]} | array | array ...

``None`` stands in the list of arrays where there is none.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from mtp_jax.decode.host import Chunk, SamplingState, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, PageKey, SamplingMode, StepKey, Topology

_SIZE = struct.Struct("<I")
# Bounds for damaged messages: fields take a few hundred bytes, and no array of the log has eight axes.
_MOST_JSON = 1 << 20
_MOST_AXES = 8
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
_ALL = [np.dtype(kind) for kind in (*_PLAIN, "float16", "float32", "float64", *_NARROW)]
_DTYPES = {d.name: d for d in _ALL}  # what an array may be: no objects
_KEYS: dict[str, type] = {k.__name__: k for k in (StepKey, DraftKey, PageKey)}


class LogError(Exception):
    """A message that cannot be read, or must not come."""


@dataclass(frozen=True)
class Body:
    """What a message says."""

    fields: Mapping[str, Any]
    arrays: Sequence[np.ndarray | None]

    @property
    def key(self) -> Key:
        """The key of a program. Raises LogError."""
        return decode_key(self.fields.get("key"))

    def whole(self, name: str) -> int:
        """A field that is a number. Raises LogError."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise LogError(f"{name} = {value!r:.80}; expected an integer")
        return value

    def all(self, count: int) -> list[np.ndarray]:
        """The arrays, so many and none of them None. Raises LogError."""
        found = [a for a in self.arrays if a is not None]
        if len(found) != count or len(self.arrays) != count:
            raise LogError(f"{len(found)} arrays; expected {count}")
        return found


def encode(fields: Mapping[str, Any], arrays: Sequence[np.ndarray | None] = ()) -> bytes:
    """A body. Raises LogError for arrays of another dtype than numbers."""
    given = [None if a is None else np.ascontiguousarray(a).reshape(np.shape(a)) for a in arrays]
    for a in given:
        if a is not None and a.dtype.name not in _DTYPES:
            raise LogError(f"an array of {a.dtype} cannot be sent")
    described = [a if a is None else [a.dtype.name, list(a.shape)] for a in given]
    head = json.dumps({"fields": dict(fields), "arrays": described}).encode()
    return b"".join([_SIZE.pack(len(head)), head, *(a.tobytes() for a in given if a is not None)])


def decode(body: bytes | bytearray) -> Body:
    """What ``encode`` was given; the arrays are read-only. Raises LogError."""
    try:
        return _decode(memoryview(body))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise LogError(f"a message that cannot be read: {type(error).__name__}: {error}"[:200]) from error


def _decode(body: memoryview) -> Body:
    (size,) = _SIZE.unpack_from(body)
    if size > min(_MOST_JSON, len(body) - _SIZE.size):
        raise ValueError(f"{size} bytes of JSON")
    at = _SIZE.size + size
    head = json.loads(bytes(body[_SIZE.size : at]))
    arrays: list[np.ndarray | None] = []
    for described in head["arrays"]:
        if described is None:
            arrays.append(None)
            continue
        name, shape = described
        dtype = _DTYPES[name]
        if len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape}"[:80])
        count = math.prod(shape)
        if count * dtype.itemsize > len(body) - at:
            raise ValueError(f"{name} {shape} is longer than its message"[:120])
        arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    if at != len(body) or not isinstance(head["fields"], dict):
        raise ValueError(f"{len(body) - at} bytes too many, or no fields")
    return Body(head["fields"], arrays)


def encode_key(key: Key) -> dict[str, Any]:
    """For JSON."""
    return {"kind": type(key).__name__, **asdict(key)}


def decode_key(given: Any) -> Key:
    """What ``encode_key`` was given. Raises LogError."""
    try:
        found = dict(given)
        kind = _KEYS[found.pop("kind")]
        if kind is StepKey:
            found["mode"] = SamplingMode(**found["mode"])
            tree = found["topology"]
            found["topology"] = None if tree is None else Topology(tuple(tree["parents"]))
        return kind(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise LogError(f"unknown key {given!r:.120}") from error


def row_arrays(row: SlotRow) -> list[np.ndarray]:
    """The arrays of a row, the sampler's last."""
    own = [getattr(row, f.name) for f in fields(SlotRow) if f.name != "sampling"]
    return [np.asarray(a) for a in (*own, *(getattr(row.sampling, f.name) for f in fields(SamplingState)))]


def row_of(arrays: Sequence[np.ndarray]) -> SlotRow:
    """What ``row_arrays`` was given."""
    first = len(fields(SlotRow)) - 1
    return SlotRow(*arrays[:first], sampling=SamplingState(*arrays[first:]))


ROW_ARRAYS = len(fields(SlotRow)) - 1 + len(fields(SamplingState))


def chunk_arrays(chunk: Chunk | None) -> list[np.ndarray]:
    """The arrays of a chunk; none without one."""
    return [] if chunk is None else [np.asarray(getattr(chunk, f.name)) for f in fields(Chunk)]


def chunk_of(arrays: Sequence[np.ndarray]) -> Chunk | None:
    """What ``chunk_arrays`` was given."""
    return Chunk(*arrays) if arrays else None


CHUNK_ARRAYS = len(fields(Chunk))
