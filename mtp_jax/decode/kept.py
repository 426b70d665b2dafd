"""Compiled programs in a folder, which a later process loads instead of tracing, lowering and compiling.

JAX's own cache spares XLA's compilation, but its key of a program is the lowered program. Here the key is a
digest of everything that determines it (``facts``). JAX's cache is left alone meanwhile: XLA cannot serialise
an executable of a CPU that was itself loaded, as parts of its code are missing then.

The format is that of ``jax.experimental``: a pickle beside machine code. Both are executed when they are
read, so the folder must be trusted as this package is; ``api/compile_cache.py`` cares for that.
"""

import hashlib
import logging
import os
import pickle
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from mtp_jax.decode import facts

_LOG = logging.getLogger(__name__)
_FORMAT = b"mtp-jax program 1\n"
_JAXS_CACHE = "jax_enable_compilation_cache"
_SIZE = hashlib.sha256().digest_size


class KeptPrograms:
    """The programs of one runner in a folder, each by its name and its key.

    Attributes:
        folder: where they are; None: nothing is kept.
        loaded, compiled: number of programs that were found there, and that had to be compiled.
    """

    def __init__(self, folder: Path | None, mesh: Mesh | None, *shared: Any) -> None:
        """Reads nothing yet.

        folder: a folder that no other user may write to; None: nothing is kept. mesh: the mesh that runs the
        programs; None: the first device. shared: the facts that determine all of the programs, together with
        a program's key.
        """
        self.loaded = self.compiled = 0
        self.folder, self._mesh = folder, mesh
        self._shared, self._told = "", False
        if folder is None:
            return
        try:
            self._shared = facts.digest_of(*shared)
        except facts.Unknown as reason:
            _LOG.info("compiled programs are not kept: %s", reason)
            self.folder = None

    def get(self, name: str, key: Any, compile: Callable[[], Any]) -> Any:
        """The program, from the folder or else from ``compile``, which traces, lowers and compiles it."""
        path = self._path(name, key)
        found = path and self._load(path)
        if found is not None:
            self.loaded += 1
            return found
        # Before it runs: a sort that has run cannot be serialised.
        with _jaxs_cache.left_alone() if path else nullcontext():
            found = compile()
        self.compiled += 1
        if path:
            self._save(path, found)
        return found

    def _path(self, name: str, key: Any) -> Path | None:
        if self.folder is None:
            return None
        try:
            return self.folder / f"{name}-{facts.digest(self._shared, name, key)}-program"
        except facts.Unknown as reason:
            _LOG.info("the program %s is not kept: %s", name, reason)
            return None

    def _load(self, path: Path) -> Any:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head, sum_, body = data[: len(_FORMAT)], data[len(_FORMAT) :][:_SIZE], data[len(_FORMAT) + _SIZE :]
        try:
            if head != _FORMAT or sum_ != _sum(path, body):
                raise ValueError("it is damaged, or was written for another program")
            program, arguments, results = pickle.loads(zlib.decompress(body))
            devices = jax.devices()[:1] if self._mesh is None else [*self._mesh.devices.flat]
            return deserialize_and_load(program, arguments, results, execution_devices=devices)
        except Exception as error:  # a file of any contents costs a compilation, no more
            if not self._told:
                _LOG.warning("%s is not used, and written anew: %s", path, error)
            self._told = True
            return None

    def _save(self, path: Path, program: Any) -> None:
        """Put a program into the folder as a whole, so that other processes find all of it or nothing."""
        try:
            if (file := facts.changed()) is not None:
                _LOG.info("the program %s is not kept: %s has changed", path.name, file)
                return
            body = zlib.compress(pickle.dumps(serialize(program)), 1)
        except Exception as error:  # of this program, or of this backend
            _LOG.info("the program %s cannot be kept: %s", path.name, error)
            return
        try:
            number, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            try:
                with open(number, "wb") as file:
                    file.write(_FORMAT + _sum(path, body) + body)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as error:  # a folder to read from alone, or a full disk
            _LOG.info("the program %s is not kept: %s", path.name, error.strerror)


def _sum(path: Path, body: bytes) -> bytes:
    """The checksum of a file's contents and of the program that it is for."""
    return hashlib.sha256(path.name.encode() + body).digest()


class _JaxsCache:
    """JAX's own cache of programs, one for all threads: while one compiles without it, no other has it."""

    def __init__(self) -> None:
        self._lock, self._compiling, self._before = threading.Lock(), 0, True

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Neither read it nor write to it."""
        with self._lock:
            if not self._compiling:
                self._before = jax.config.values[_JAXS_CACHE]
                self._set(False)
            self._compiling += 1
        try:
            yield
        finally:
            with self._lock:
                self._compiling -= 1
                if not self._compiling:
                    self._set(self._before)

    def _set(self, on: bool) -> None:
        jax.config.update(_JAXS_CACHE, on)
        reset_cache()  # it reads its options with its first program only


_jaxs_cache = _JaxsCache()
