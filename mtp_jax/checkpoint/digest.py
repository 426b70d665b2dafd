"""Digests of checkpoints, of every byte: two that are equal hold the same tensors.

SHA-256, as processors have instructions for it and hashlib leaves the interpreter's lock. Tensors are hashed
one by one, in threads, and joined by name, so that tensors in other shards, or in memory, have the same
digest.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from mtp_jax.checkpoint.folder import Folder, open_folder
from mtp_jax.checkpoint.safetensors_file import SafetensorsFile, Tensor
from mtp_jax.errors import CheckpointError
from mtp_jax.machine import usable_cores

# Bytes read at a time: they fit the caches next to a core.
_PIECE_BYTES = 1 << 20

_T = TypeVar("_T")


class DigestPart(NamedTuple):
    """Bytes under a name: a tensor, or a file.

    Attributes:
        name: unlike all other names of a digest.
        pieces: reads the bytes, in order.
    """

    name: str
    pieces: Callable[[], Iterator[np.ndarray]]


def folder_digest(folder: Path, weights: bool = False) -> str:
    """Digest every tensor of a folder and all other files that are not hidden: 64 hexadecimal digits.

    weights: the tensors alone, where there are any. Raises CheckpointError.
    """
    seen = files_of(folder)
    holds = any(name.match("*.safetensors") and len(name.parts) == 1 for name in seen)
    opened = open_folder(folder) if holds else Folder(folder, {})
    tensors, read = tensors_of(opened), {t.file.path for t in opened.tensors.values()}
    if weights and tensors:
        return digest(tensors)
    return digest([*tensors, *(_of_file(folder, name) for name in seen if folder / name not in read)])


def folder_sizes(folder: Path) -> str:
    """Digest the names and sizes of all files that are not hidden; no file is opened."""
    sizes = [(name.as_posix(), (folder / name).stat().st_size) for name in files_of(folder)]
    return hashlib.sha256(repr(sorted(sizes)).encode()).hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Names of all files of a folder that are not hidden."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [name for name in found if not any(part.startswith(".") for part in name.parts)]


def tensors_of(folder: Folder) -> list[DigestPart]:
    """All tensors of a folder, also of parts that are not read."""
    return [_of_tensor(t) for t in chain(folder.tensors.values(), folder.unread.values())]


def digest(parts: Iterable[DigestPart]) -> str:
    """Digest some parts, in any order: 64 hexadecimal digits. Raises CheckpointError."""
    parts = list(parts)
    hashes: dict[str, bytes] = {}
    faults: list[Exception] = []
    left, lock = iter(parts), threading.Lock()

    def work() -> None:
        while not faults:
            with lock:
                part = next(left, None)
            if part is None:
                return
            own = hashlib.sha256()
            try:
                for piece in part.pieces():
                    own.update(piece.data)
            except Exception as error:  # a part that is not read must not be missing in silence
                faults.append(error)
                return
            hashes[part.name] = own.digest()

    # An executor's threads would hold up the end of a process until they have read everything.
    threads = [threading.Thread(target=work, name="digest", daemon=True) for _ in range(usable_cores())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def beside(compute: Callable[[], _T]) -> Future[_T]:
    """Compute digests in a thread that does not hold up the end of the process."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="digest", daemon=True).start()
    return future


def _of_tensor(tensor: Tensor) -> DigestPart:
    def pieces() -> Iterator[np.ndarray]:
        return _pieces(tensor.file.read, tensor.start, tensor.nbytes)

    return DigestPart(repr((tensor.name, tensor.dtype, tensor.shape)), pieces)


def _of_file(folder: Path, name: Path) -> DigestPart:
    def pieces() -> Iterator[np.ndarray]:
        try:
            file = SafetensorsFile(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        return _pieces(file.read, 0, file.size)

    return DigestPart(repr(("file", name.as_posix())), pieces)


def _pieces(read: Callable[[int, int], np.ndarray], start: int, nbytes: int) -> Iterator[np.ndarray]:
    return (read(start + at, min(_PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, _PIECE_BYTES))
