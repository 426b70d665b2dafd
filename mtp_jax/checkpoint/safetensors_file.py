"""Safetensors files: opened and checked by the ``safetensors`` library, tensors as views of a memory map.

The library's own readers copy a tensor, and know no float8 in numpy. It refuses a file with gaps or overlaps,
so a tensor's place follows from the sizes of those before it, and the bytes are mapped here. What the library
refuses is read once more, to name the tensor and what was expected.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mtp_jax.errors import CheckpointError

MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        file: the file that holds it.
        name: its name in that file.
        dtype: its dtype in safetensors' words, a key of ``DTYPES``.
        shape: its shape.
        start: offset of its first byte in the file.
        nbytes: its size.
    """

    file: "SafetensorsFile"
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def array(self) -> np.ndarray:
        """The tensor as a read-only view of the memory map: no bytes are read until they are used."""
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)

    def bytes(self) -> np.ndarray:
        """Its bytes, uint8 [nbytes], as a read-only view of the memory map."""
        return self.file.map[self.start : self.start + self.nbytes]

    def __str__(self) -> str:
        return f"{self.file.path}: tensor {self.name}"


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    """An open file: its path and the byte count that was checked."""

    path: Path
    size: int

    @cached_property
    def map(self) -> np.ndarray:
        """The whole file, uint8 [size], mapped read-only at first use."""
        now = self.path.stat().st_size
        if now != self.size:
            raise CheckpointError(f"{self.path} changed while it was read: {self.size} bytes, now {now}")
        return np.asarray(np.memmap(self.path, np.uint8, "r"))


def open_file(path: Path) -> dict[str, Tensor]:
    """Check a file's header and layout and return its tensors by name, in file order.

    Raises CheckpointError naming the file, and the tensor where there is one, for a bad header length, a
    header that is not JSON, a duplicate name, an unknown dtype, offsets that do not fit shape and dtype,
    overlap, gaps and a truncated file.
    """
    try:
        size = path.stat().st_size
        try:
            with safe_open(path, "np") as opened:
                slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
                found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
        except SafetensorError as e:
            _raise_first_fault(path, size)
            raise CheckpointError(f"{path} is damaged: {e}") from e
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
    for name, (dtype, _) in found.items():
        _check_dtype(f"{path}: tensor {name}", dtype)
    file = SafetensorsFile(path, size)
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in found.values()]
    starts = accumulate(sizes, initial=size - sum(sizes))
    return {
        name: Tensor(file, name, dtype, shape, start, nbytes)
        for (name, (dtype, shape)), start, nbytes in zip(found.items(), starts, sizes, strict=False)
    }


def strict_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object without repeated keys. Raises CheckpointError that begins with ``where``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise CheckpointError(f"{where} lists {key!r:.200} twice; expected each name once")
            out[key] = value
        return out

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{where} is not valid JSON ({e}); the file is damaged") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {type(value).__name__}; expected an object")
    return value


def _check_dtype(where: str, dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {dtype!r:.50}; expected one of {', '.join(DTYPES)}")


def _raise_first_fault(path: Path, size: int) -> None:
    """Raise CheckpointError for what is wrong with a file, in more words than the library has."""
    with path.open("rb") as f:
        head = f.read(8)
        length, most = int.from_bytes(head, "little"), min(size - 8, MAX_HEADER)
        if len(head) < 8:
            raise CheckpointError(f"{path} is truncated: {size} bytes; even the header length takes 8")
        if not 2 <= length <= most:
            raise CheckpointError(
                f"{path} has header length {length}; expected 2 to {most}, as the file has {size} bytes: it "
                "is truncated or not a safetensors file"
            )
        entries = strict_json(f.read(length), f"{path}: the header")
    entries.pop("__metadata__", None)
    at, previous = 8 + length, "the header"
    spans = [(*_span(f"{path}: tensor {n}", e, at, size), n) for n, e in entries.items()]
    for start, end, name in sorted(spans):
        if start != at:
            kind = "overlaps" if start < at else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name} starts at byte {start} and {kind} {previous}; expected byte {at}: "
                "the file is damaged"
            )
        at, previous = end, name
    if at != size:
        raise CheckpointError(
            f"{path} has {size - at} bytes after its last tensor; expected {at} bytes, got {size}"
        )


def _span(where: str, entry: Any, base: int, size: int) -> tuple[int, int]:
    """First byte and end of a tensor, of those of a file whose tensors begin at ``base``."""

    def naturals(value: Any) -> bool:
        return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} has header entry {entry!r:.200}; expected dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    _check_dtype(where, dtype)
    if not naturals(shape):
        raise CheckpointError(f"{where} has shape {shape!r:.200}; expected a list of numbers >= 0")
    if not naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {offsets!r:.200}; expected [begin, end]")
    start, end = (base + x for x in offsets)
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != expected:
        raise CheckpointError(
            f"{where} has data_offsets {offsets}, {end - start} bytes; expected {expected} bytes for {dtype} "
            f"{shape}"
        )
    if end > size:
        raise CheckpointError(
            f"{where} ends at byte {end}, but the file has {size} bytes: it is truncated; download or copy "
            "it again"
        )
    return start, end
