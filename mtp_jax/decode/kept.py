"""Compiled programs in a folder, which a later process loads instead of tracing, lowering and compiling.

JAX's own cache spares XLA's compilation, but its key of a program is the lowered program. Here the key is a
digest of everything that determines it (``facts``). JAX's cache is left alone meanwhile: XLA cannot serialise
an executable of a CPU that was itself loaded, as parts of its code are missing then.

Two folders have this form. The user's own is a cache: another fact finds other files. The folder of
`mtp-jax compile` has a manifest: another fact is an error that names it.

The format is that of ``jax.experimental``: a pickle beside machine code. Both are executed when they are
read, so a folder must be trusted as this package is: ``api/compile_cache.py`` cares for the user's own, and
the user for one that is named.
"""

import hashlib
import logging
import os
import pickle
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from mtp_jax.decode import facts
from mtp_jax.decode.manifest import Manifest
from mtp_jax.errors import ConfigError

_LOG = logging.getLogger(__name__)
_FORMAT = b"mtp-jax program 1\n"
_JAXS_CACHE = "jax_enable_compilation_cache"
_SIZE = hashlib.sha256().digest_size


class KeptPrograms:
    """The programs of one runner in a folder, each by its name and its key.

    Attributes:
        folder: where they are; None: nothing is kept.
        loaded, compiled: number of programs that were found there, and that had to be compiled.
        facts: all that determines the programs, by name; empty where nothing is kept.
        used: names of the files in ``folder`` that were loaded or written.
    """

    def __init__(
        self, folder: Path | None, devices: Sequence[Any] = (), built: Path | None = None, **subjects: Any
    ) -> None:
        """Reads no program yet.

        folder: a folder that no other user may write to; None: nothing is kept. devices: the devices that
        run the programs, of a mesh or absent; none: the first. built: a folder of `mtp-jax compile`, which is
        asked first. subjects: the facts that determine all of the programs, together with a program's key.

        Raises ConfigError where ``built`` was made for another fact, is damaged, or cannot be read.
        """
        self.loaded = self.compiled = 0
        self.folder, self._built, self._told = folder, built, False
        self._devices = [*devices] or jax.devices()[:1]
        self._absent = self._devices[0] not in jax.devices()
        self.facts, self.used = dict[str, str](), set[str]()
        self._files: Mapping[str, str] = {}
        if folder is None and built is None:
            return
        try:
            self.facts = facts.named(self._devices, **subjects)
        except facts.Unknown as reason:
            if built is not None:
                raise ConfigError(
                    f"programs = {str(built)!r}: nothing says whether they fit, as {reason}; leave programs "
                    "out"
                ) from reason
            _LOG.info("compiled programs are not kept: %s", reason)
            self.folder = None
        self._shared = facts.digest(*self.facts.items())
        if built is not None:
            manifest = Manifest.read(built)
            manifest.check_files(built)
            manifest.check_facts(built, self.facts)
            self._files = manifest.programs

    @property
    def keeps(self) -> bool:
        """Whether a program is looked for before it is compiled."""
        return self.folder is not None or self._built is not None

    def get(self, name: str, key: Any, compile: Callable[[], Any]) -> Any:
        """The program, from a folder or else from ``compile``, which traces, lowers and compiles it.

        Raises ConfigError for a damaged file in the folder of `mtp-jax compile`.
        """
        file = self._file(name, key)
        found = file and (self._load_built(file) or self._load(file))
        if found is not None:
            self.loaded += 1
            return found
        if file and self._built is not None:
            _LOG.warning("%s is not among the programs in %s, and is compiled", name, self._built)
        keeps = file is not None and self.folder is not None
        # Before it runs: a sort that has run cannot be serialised.
        with _jaxs_cache.left_alone() if keeps else nullcontext():
            found = compile()
        self.compiled += 1
        if file and self.folder is not None:
            self._save(self.folder / file, found)
        return found

    def _file(self, name: str, key: Any) -> str | None:
        if not self.keeps:
            return None
        try:
            return f"{name}-{facts.digest(self._shared, name, key)}-program"
        except facts.Unknown as reason:
            _LOG.info("the program %s is not kept: %s", name, reason)
            return None

    def _load_built(self, file: str) -> Any:
        if self._built is None or file not in self._files:
            return None
        path = self._built / file
        try:
            return self._program(path, path.read_bytes())
        except Exception as error:  # it was whole when this object was made
            raise ConfigError(
                f"{path} cannot be used: {error!s:.200}; run mtp-jax compile again, or leave programs out"
            ) from error

    def _load(self, file: str) -> Any:
        if self.folder is None:
            return None
        path = self.folder / file
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            found = self._program(path, data)
            self.used.add(file)
            return found
        except Exception as error:  # a file of any contents costs a compilation, no more
            if not self._told:
                _LOG.warning("%s is not used, and written anew: %s", path, error)
            self._told = True
            return None

    def _program(self, path: Path, data: bytes) -> Any:
        head, sum_, body = data[: len(_FORMAT)], data[len(_FORMAT) :][:_SIZE], data[len(_FORMAT) + _SIZE :]
        if head != _FORMAT or sum_ != _sum(path, body):
            raise ValueError("it is damaged, or was written for another program")
        if self._absent:
            return body  # which nothing runs here
        program, arguments, results = pickle.loads(zlib.decompress(body))
        return deserialize_and_load(program, arguments, results, execution_devices=self._devices)

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
            self.used.add(path.name)
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
