"""Safetensors files: checked by the ``safetensors`` library, read here, a few rows of a tensor at a time.

No checkpoint is mapped, because SIGBUS ends a process that touches a mapped page of a file which another
process has truncated. The library maps the files that it opens, and has no float8 in numpy. So it gets a file
in memory with the header and the length of the checkpoint's file, and returns its entries. It refuses gaps
and overlaps, so a tensor's place follows from the sizes of the tensors before it.
"""

import math
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open

from mtp_jax.errors import CheckpointError, shown

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
_LENGTH = 8  # bytes before the header, with its length
_MOST_HEADER = 100_000_000  # bytes: the library refuses a longer header by its length


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        file: the file that holds it, or the caller's memory.
        name: its name in that file.
        dtype: its dtype in safetensors' words, a key of ``DTYPES``.
        shape: its shape.
        start: offset of its first byte in the file.
        nbytes: bytes of its data.
    """

    file: "SafetensorsFile | Held"
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def array(self, rows: range | None = None) -> np.ndarray:
        """The tensor, or some neighbours along its first axis: read now, read-only.

        Raises CheckpointError if the file has changed since it was opened.
        """
        start, nbytes, shape = self.start, self.nbytes, self.shape
        if rows is not None:
            row = nbytes // shape[0] if shape[0] else 0
            start, nbytes = start + rows.start * row, len(rows) * row
            shape = (len(rows), *shape[1:])
        return self.file.read(start, nbytes).view(DTYPES[self.dtype]).reshape(shape)

    def __str__(self) -> str:
        return f"{self.file.path}: tensor {shown(self.name)}"


class SafetensorsFile:
    """An open file, closed when nothing refers to it any more. Any thread may read.

    Attributes:
        path: its path when it was opened. size: its bytes at that time.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        self._seeking = threading.Lock()
        weakref.finalize(self, os.close, self._fd)
        self._state = self._now()
        self.size = self._state[0]

    def read(self, start: int, count: int) -> np.ndarray:
        """Bytes of the file, uint8 [count], read-only. Raises CheckpointError if it has changed."""
        found = np.empty(count, np.uint8)
        view, at = found.data, 0
        self._check()
        try:
            while at < count and (got := self._read_at(view[at:], start + at)):
                at += got
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        self._check()  # the file is still the opened file, with all its bytes
        found.flags.writeable = False
        return found

    def _read_at(self, into: memoryview, at: int) -> int:
        """Read bytes from a place of the file; their number, 0 at its end. Raises OSError."""
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [into], at)
        with self._seeking:  # not on every system can threads read without moving the file's position
            os.lseek(self._fd, at, os.SEEK_SET)
            got = os.read(self._fd, len(into))
        into[: len(got)] = got
        return len(got)

    def _now(self) -> tuple[int, int]:
        about = os.fstat(self._fd)
        return about.st_size, about.st_mtime_ns

    def _check(self) -> None:
        if (now := self._now()) != self._state:
            raise CheckpointError(
                f"{self.path} changed while it was read: {self.size} bytes, now {now[0]}; try again once "
                "it is written, or write another file and rename it"
            )


@dataclass(frozen=True, eq=False)
class Held:
    """The bytes of a caller's array, in place of a file. Messages name ``path``."""

    path: Path
    data: np.ndarray

    def read(self, start: int, count: int) -> np.ndarray:
        """Bytes of the array, uint8 [count]."""
        return self.data[start : start + count]


def hold(name: str, array: ArrayLike) -> Tensor:
    """An array of the caller as a tensor. Raises CheckpointError for a dtype that no file could hold."""
    array = np.asarray(array)
    dtype = next((known for known, kind in DTYPES.items() if kind == array.dtype), None)
    if dtype is None:
        raise CheckpointError(f"{name} has dtype {array.dtype}; expected one of {', '.join(DTYPES)}")
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Tensor(Held(Path("arrays"), data), name, dtype, array.shape, 0, data.nbytes)


def open_file(path: Path) -> dict[str, Tensor]:
    """Check a file's header and layout and return its tensors by name, in file order.

    Raises CheckpointError naming the file, for all that the library refuses (a bad header, a name of two
    tensors, offsets that do not fit shape and dtype, overlap, gaps, a truncated file) and an unknown dtype.
    """
    try:
        file = SafetensorsFile(path)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
    try:
        found = _declared(file)
    except SafetensorError as e:
        raise CheckpointError(
            f"{path} ({file.size} bytes) is truncated, damaged or no safetensors file: {e}; download or copy "
            "it again"
        ) from e
    for name, (dtype, _) in found.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has dtype {dtype!r:.80}; expected one of {', '.join(DTYPES)}"
            )
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in found.values()]
    starts = accumulate(sizes, initial=file.size - sum(sizes))
    return {
        name: Tensor(file, name, dtype, shape, start, nbytes)
        for (name, (dtype, shape)), start, nbytes in zip(found.items(), starts, sizes, strict=False)
    }


def _declared(file: SafetensorsFile) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor, in file order. Raises SafetensorError, CheckpointError."""
    said = int.from_bytes(file.read(0, min(_LENGTH, file.size)).tobytes(), "little")
    header = file.read(0, min(_LENGTH + min(said, _MOST_HEADER), file.size))
    with _in_memory() as copy:
        copy.write(header.data)
        copy.truncate(file.size)
        copy.flush()
        with safe_open(f"/dev/fd/{copy.fileno()}", "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def _in_memory() -> IO[bytes]:
    """A new file without a name, in memory where the system has such files; holes in it take no memory."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("header"), "w+b")
    return tempfile.TemporaryFile()
