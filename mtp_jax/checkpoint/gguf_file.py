"""A GGUF file, read through the library ``gguf``: keys and tensors, each checked before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.errors import CheckpointError, ConfigError

# Entries of the longest list: the largest vocabularies have 262,144 tokens and two merges for each.
_LONGEST = 2**22


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        kind: its type in the file, such as "Q4_1".
        array: reads it, in float32.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    array: Callable[[], np.ndarray]


@dataclass(frozen=True)
class GgufFile:
    """An open file: its keys with their values, and its tensors by name."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Check a file's header; no tensor is read.

    Raises ConfigError without the library, CheckpointError for a file that is damaged or cut off.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} is GGUF, which needs the extra gguf; install it with: pip install {error.name}"
        ) from error

    class BoundedReader(gguf.GGUFReader):
        """A reader that stays within the file, which the library's own does not."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends before the values that its header announces")
            return super()._get(offset, dtype, count, *rest, **more)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            is_list = raw_type == gguf.GGUFValueType.ARRAY
            # Behind the type of its entries, in four bytes, a list has their number.
            if is_list and (count := self._get(orig_offs + 4, np.uint64)[0]) > _LONGEST:
                raise ValueError(f"a list of {count} values; expected at most {_LONGEST:,}")
            return super()._get_field_parts(orig_offs, raw_type)

    with _damages(path), np.errstate(all="raise"):
        read = BoundedReader(path)
        if read.endianess != gguf.GGUFEndian.LITTLE:
            raise ValueError("its numbers are big-endian; expected little-endian")
        facts = {name: field.contents() for name, field in read.fields.items()}
        tensors = {t.name: _tensor(path, t, gguf.dequantize) for t in read.tensors}
    return GgufFile(path, facts, tensors)


def _tensor(path: Path, tensor: Any, dequantize: Callable[[Any, Any], np.ndarray]) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = tensor.tensor_type.name

    def array() -> np.ndarray:
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: {tensor.name} is in {kind}, which the library gguf cannot dequantise; take a file "
                "of another quantisation"
            ) from error

    return GgufTensor(tensor.name, shape, kind, array)


@contextmanager
def _damages(path: Path) -> Iterator[None]:
    """Turn all that the library raises for bytes that are no GGUF into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # of any kind, by the bytes
        raise CheckpointError(f"{path} is damaged: {error!s:.200}; copy it again") from error
