"""Safetensors files: opened and checked by the ``safetensors`` library, tensors as views of a memory map.

The library's own readers copy a tensor, and know no float8 in numpy. It refuses a file with gaps or overlaps,
so a tensor's place follows from the sizes of those before it, and the bytes are mapped here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open

from mtp_jax.errors import CheckpointError

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
        file: the file that holds it, or the caller's memory.
        name: its name in that file.
        dtype: its dtype in safetensors' words, a key of ``DTYPES``.
        shape: its shape.
        start: offset of its first byte in the file.
        nbytes: its size.
    """

    file: "SafetensorsFile | Held"
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


@dataclass(frozen=True, eq=False)
class Held:
    """The bytes of one array of the caller, in the place of a file. ``path`` is for messages."""

    path: Path
    map: np.ndarray


def hold(name: str, array: ArrayLike) -> Tensor:
    """An array of the caller as a tensor. Raises CheckpointError for what no file could hold."""
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
    size = 0
    try:
        size = path.stat().st_size
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as e:
        raise CheckpointError(
            f"{path} ({size} bytes) is truncated, damaged or no safetensors file: {e}; download or copy it "
            "again"
        ) from e
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
    for name, (dtype, _) in found.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}"
            )
    file = SafetensorsFile(path, size)
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in found.values()]
    starts = accumulate(sizes, initial=size - sum(sizes))
    return {
        name: Tensor(file, name, dtype, shape, start, nbytes)
        for (name, (dtype, shape)), start, nbytes in zip(found.items(), starts, sizes, strict=False)
    }
