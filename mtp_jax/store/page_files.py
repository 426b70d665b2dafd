"""Files that hold one page each. Any number of processes may share a folder.

    FOLDER / identity of the pages / digest of a page.page: a header, and the arrays as they are in memory

A file is written under a name of its own and renamed, so no process sees a part of it. Nothing is locked: a
file may go at any time, which is a miss, and a file that is not the page of its name is deleted. The checksum
is against accidents: a user who may write to the folder can give a model false pages.
"""

import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtp_jax.errors import ConfigError
from mtp_jax.store.page import Page, size

_LOG = logging.getLogger(__name__)

_MAGIC = b"mtp-jax page 1\n\0"
_HEADER = struct.Struct("<16s32s32sI")  # the magic bytes, identity, digest, checksum of the arrays
_FOLDERS, _PAGES = re.compile("[0-9a-f]{64}"), re.compile(r"[0-9a-f]{64}\.page")
_UNFINISHED = re.compile(r"[0-9a-f]{16}\.part")
# A page is written in seconds; a part that has not grown for so long is left from a process that was killed.
_ABANDONED = 3600.0
# Servers look at the folder after each such share of the budget that they wrote, so n of them exceed it by
# n - 1 shares at most.
_SHARE = 64

PageForm = tuple[tuple[tuple[int, ...], np.dtype], ...]
"""Shape and type of each array of a page."""


class PageKind(NamedTuple):
    """Pages of equal weights and of one form, which can stand for each other.

    Attributes:
        identity: 32 bytes that other kinds do not have.
        form: form of the pages.
    """

    identity: bytes
    form: PageForm


class PageFiles:
    """The files of a folder. Any thread may read; one thread at a time may use the other methods.

    Attributes:
        folder: the folder. budget: most bytes of all files of pages in it, of any kind.
        held: bytes of these files when they were last looked at, and of files written since.
        read_bytes: bytes of pages read so far.
        hits, missed: numbers of pages that were read, and that were looked for where there was no file.
        written: number of pages written so far.
        dropped: number of pages that were lost, by reason: "room", "damaged", "foreign" or "unreadable"
            files, "unwritable" pages.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        """Makes the folder if it is missing. Raises ConfigError."""
        self.folder, self.budget, self.held = folder, budget, 0
        self.read_bytes = self.hits = self.missed = self.written = 0
        self.dropped: Counter[str] = Counter()
        self._share = budget // _SHARE
        self._since = 0  # bytes written since the last look
        self._said: set[tuple[str, int | None]] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"file_cache = {str(folder)!r:.200} cannot be made a folder ({error.strerror}); name another"
            ) from error

    def read(self, kind: PageKind, digest: bytes) -> tuple[Page, int] | None:
        """A page and its checksum; None where there is no file of it, or another one, which is deleted."""
        path = self._path(kind, digest)
        try:
            data = _contents(path, _HEADER.size + bytes_of(kind.form))
        except FileNotFoundError:
            self.missed += 1
            return None
        except OSError as error:
            self._lose("unreadable", path, error)
            return None
        fault = _fault(kind, digest, data)
        if data is None or fault:
            self._lose(fault or "damaged", path)
            with suppress(OSError):
                path.unlink()
            return None
        self.hits += 1
        self.read_bytes += data.nbytes
        return tuple(_arrays(kind.form, data[_HEADER.size :])), _HEADER.unpack_from(data.data)[3]

    def touch(self, kind: PageKind, digest: bytes) -> bool:
        """Mark a page as used just now. Returns whether there is a file of its name."""
        now = time.time_ns()
        try:
            os.utime(self._path(kind, digest), ns=(now, now))
        except FileNotFoundError:
            return False
        except OSError:  # a folder that may only be read
            pass
        return True

    def write(self, kind: PageKind, digest: bytes, page: Page, crc: int) -> bool:
        """Write a page, after old files are deleted where it needs room. Returns whether it was written."""
        path, needed = self._path(kind, digest), _HEADER.size + size(page)
        if needed > self.budget:
            self.dropped["room"] += 1
            return False
        part = path.with_name(f"{secrets.token_hex(8)}.part")
        try:
            self._make_room(needed)
            with suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)  # not its parents: the folder is there, or has gone
            with part.open("xb", buffering=0) as file:
                _write_all(file, _HEADER.pack(_MAGIC, kind.identity, digest, crc))
                for array in page:
                    _write_all(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            now = time.time_ns()  # finer than a file system's own times, and as ``touch`` has them
            os.utime(part, ns=(now, now))
            part.replace(path)
        except OSError as error:
            self._lose("unwritable", path, error)
            with suppress(OSError):
                part.unlink()
            return False
        self.held += needed
        self._since += needed
        self.written += 1
        return True

    def delete(self, kind: PageKind, digest: bytes) -> None:
        """Delete the file of a page, if there is one."""
        with suppress(OSError):
            self._path(kind, digest).unlink()

    def look(self, needed: int = 0) -> None:
        """Look at all files; delete the oldest until ``needed`` bytes, and a share, have room.

        Raises OSError if the folder cannot be read.
        """
        found = [*self._found()]
        self.held, self._since = sum(nbytes for _, nbytes, _ in found), 0
        if self.held + needed <= self.budget:
            return
        found.sort()
        for _, nbytes, path in found:
            if self.held + needed + self._share <= self.budget:
                return
            try:
                os.unlink(path)
                self.dropped["room"] += 1
            except FileNotFoundError:  # another server was faster
                pass
            self.held -= nbytes

    def _make_room(self, needed: int) -> None:
        if self.held + needed > self.budget or self._since + needed > self._share:
            self.look(needed)

    def _found(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, bytes and path of every page's file; parts that were abandoned are deleted."""
        for folder in _entries(self.folder):
            if not (_FOLDERS.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for entry in _entries(folder.path):
                page = _PAGES.fullmatch(entry.name)
                if not page and not _UNFINISHED.fullmatch(entry.name):
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                    if page and stat.S_ISREG(info.st_mode):
                        yield info.st_mtime_ns, info.st_size, entry.path
                    elif not page and time.time() - info.st_mtime > _ABANDONED:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    pass

    def _path(self, kind: PageKind, digest: bytes) -> Path:
        return self.folder / kind.identity.hex() / f"{digest.hex()}.page"

    def _lose(self, reason: str, path: Path, error: OSError | None = None) -> None:
        """Count a page that was lost, and warn of the first one of each reason."""
        self.dropped[reason] += 1
        kind = reason, error and error.errno
        if kind not in self._said:
            self._said.add(kind)
            why = f" ({error.strerror})" if error else ""
            _LOG.warning(
                "file_cache: %s is %s%s: its page is computed and requests go on; further files like it are "
                "only counted (mtp_jax:file_cache_dropped_pages_total)",
                path,
                reason,
                why,
            )


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def _contents(path: Path, nbytes: int) -> np.ndarray | None:
    """The bytes of a file; None if it has more or fewer, or is none. Raises OSError."""
    # A pipe or a link in its place is not waited for, nor followed.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_size != nbytes:
            return None
        data, at = np.empty(nbytes, np.uint8), 0
        while at < nbytes and (got := os.readv(file, [data[at:].data])):
            at += got
        return data if at == nbytes else None
    finally:
        os.close(file)


def _write_all(file, data: bytes | memoryview) -> None:
    """Write all of it: a write to a disk that gets full may write a part."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _fault(kind: PageKind, digest: bytes, data: np.ndarray | None) -> str | None:
    """The reason why these bytes are not this page; None if they are."""
    if data is None:
        return "damaged"
    magic, identity, own, crc = _HEADER.unpack_from(data.data)
    if magic != _MAGIC:
        return "damaged"
    if (identity, own) != (kind.identity, digest):
        return "foreign"
    return None if zlib.crc32(data[_HEADER.size :].data) == crc else "damaged"


def _arrays(form: PageForm, data: np.ndarray) -> Iterator[np.ndarray]:
    """The arrays of a page, over one piece of memory."""
    at = 0
    for shape, kind in form:
        end = at + int(np.prod(shape)) * kind.itemsize
        yield data[at:end].view(kind).reshape(shape)
        at = end


def form_of(page: Page) -> PageForm:
    """The form of a page."""
    return tuple((array.shape, array.dtype) for array in page)


def bytes_of(form: PageForm) -> int:
    """Bytes of a page."""
    return sum(int(np.prod(shape)) * kind.itemsize for shape, kind in form)
