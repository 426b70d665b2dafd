"""Files as a third tier of the prefix cache, below the host's memory.

    HostTier: a page came to the host's memory -> save -> (files-write) marked as used, or written
    Scheduler: pages that no memory has -> fetch -> (files-read) read, checked -> HostTier.land -> the store

The engine's thread does no file work: it hands digests over, and looks whether pages have come. A page is
written out of the store, so nothing waits for a slow disk; a page that the store has dropped is not written.
"""

import hashlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

from mtp_jax.errors import ConfigError
from mtp_jax.store.memory import MemoryStore
from mtp_jax.store.page import Page
from mtp_jax.store.page_files import PageFiles, PageForm, PageKind, bytes_of
from mtp_jax.store.threads import FileThreads

_LOG = logging.getLogger(__name__)

# Prompts whose pages are read at a time: a disk gives more to several readers.
_READERS = 4
# A folder without the page answers within this part of a step, and the prompt is admitted in the same turn.
_GLANCE_SECONDS = 0.002
# Deadlines and aborts are looked at as often while nothing else is to be done.
_WAIT_SECONDS = 0.05
# The times of files are as fine: a page that is used more often is marked once meanwhile.
_MARK_SECONDS = 60.0


@dataclass(frozen=True)
class FileStats:
    """A snapshot of the tier of files: its contents, and its totals.

    Attributes:
        bytes: bytes of pages in the folder, of all servers, when this server last looked.
        read_bytes: bytes of pages that this server read so far.
        hits: number of pages read so far.
        missed: number of prompts so far whose next page had no file.
        written: number of pages written so far.
        dropped: number of pages lost, by reason: as in ``PageFiles``, "behind" where the host's memory had
            dropped a page that was to be written, and "late" for each prompt that went on without its pages.
    """

    bytes: int = 0
    read_bytes: int = 0
    hits: int = 0
    missed: int = 0
    written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FilesOf:
    """Where a tier has its files.

    Attributes:
        folder: their folder. budget: most bytes of them.
        seconds: most that a prompt waits for its pages.
    """

    folder: Path
    budget: int
    seconds: float

    def check(self) -> None:
        """Raise ConfigError for a path that cannot become a folder; none is made yet."""
        there = next((p for p in (self.folder, *self.folder.parents) if p.exists()), None)
        if there and not there.is_dir():
            raise ConfigError(f"file_cache = {str(self.folder)!r:.200}: {there} is no folder; name another")


class Fetch:
    """Pages of one prompt, on their way from files.

    Attributes:
        kind: their kind. flushes: number of flushes of the tier when it began.
        deadline: value of ``time.monotonic()`` up to which the prompt waits.
        found: the pages that have come so far, in order: digest, page and checksum.
        ended: event that is set once no further pages come.
        stopped: whether nobody waits for further pages.
    """

    def __init__(self, kind: PageKind, flushes: int, deadline: float) -> None:
        self.kind, self.flushes, self.deadline = kind, flushes, deadline
        self.found: list[tuple[bytes, Page, int]] = []
        self.ended, self.stopped = Event(), False

    @property
    def under_way(self) -> bool:
        """Whether the prompt should wait."""
        return not self.ended.is_set() and time.monotonic() < self.deadline


class FileTier:
    """Moves pages between a store in memory and files. The engine's thread owns it, but for ``save``.

    Attributes:
        identity: returns the facts that pages depend on besides tokens, as a string; None while they are not
            known, when nothing is read or written.
    """

    def __init__(self, files: FilesOf, store: MemoryStore, form: Callable[[], PageForm]) -> None:
        """form: returns the form of the engine's pages. Raises ConfigError for a folder that is none."""
        self.files, self._seconds, self._store = PageFiles(files.folder, files.budget), files.seconds, store
        self.identity: Callable[[], str | None] = lambda: None
        self._form_of, self._form = form, None
        self._late = self._behind = 0
        self._flushes = 0
        self._active: list[Fetch] = []
        self._marked: set[bytes] = set()
        self._cleared = time.monotonic()
        self._readers = FileThreads(_READERS, "files-read")
        self._writer = FileThreads(1, "files-write", at_exit=True)
        self._writer.do(partial(_first_look, self.files))

    def stats(self) -> FileStats:
        """The contents of the tier now, and its totals. Any thread may ask."""
        files = self.files
        more = {"behind": self._behind, "late": self._late}
        dropped = Counter(files.dropped) + Counter(more)
        return FileStats(files.held, files.read_bytes, files.hits, files.missed, files.written, dropped)

    def kind(self) -> PageKind | None:
        """The kind of the pages that the engine has now; None while it is not known."""
        facts = self.identity()
        if facts is None:
            return None
        form = self._form = self._form or self._form_of()
        described = facts, [(shape, str(dtype)) for shape, dtype in form], sys.byteorder
        return PageKind(hashlib.sha256(repr(described).encode()).digest(), form)

    # Out

    def save(self, kind: PageKind, digest: bytes) -> None:
        """Write a page that the store has, unless there is a file of it, which is marked as used."""
        now = time.monotonic()
        if now - self._cleared > _MARK_SECONDS:
            self._cleared, self._marked = now, set()
        if digest not in self._marked:
            self._marked.add(digest)
            self._writer.do(partial(self._save, kind, digest, self._flushes))

    def _save(self, kind: PageKind, digest: bytes, flushes: int) -> None:
        try:
            if self.files.touch(kind, digest):
                return
            kept = self._store.peek(digest)
            # After a flush the store may have a page of other weights by this digest.
            if kept is None or flushes != self._flushes:
                self._behind += 1
            elif self.files.write(kind, digest, *kept):
                return
        except Exception:
            _LOG.exception("a page could not be written to file_cache")
        self._marked.discard(digest)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete the files of pages that give numbers which are not finite."""
        kind = self.kind()
        for digest in digests:
            self._marked.discard(digest)
            if kind:
                self._writer.do(partial(self.files.delete, kind, digest))

    def flushed(self) -> None:
        """Drop all that is on its way to or from files, as the store is about to be emptied."""
        self._flushes += 1
        self._marked = set()

    # In

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for pages."""
        self._active = [fetch for fetch in self._active if not fetch.ended.is_set()]
        return sum(fetch.under_way for fetch in self._active)

    def fetch(self, digests: Sequence[bytes]) -> Fetch:
        """Begin to read the pages of these digests, up to the first that has no file.

        It has ended at once where pages of another prompt are overdue: the folder gives no answer.
        """
        kind = self.kind() if digests else None
        fetch = Fetch(kind or _NO_KIND, self._flushes, time.monotonic() + self._seconds)
        if kind is None or self.waiting < len(self._active):
            fetch.ended.set()
            return fetch
        self._active.append(fetch)
        room = self._store.budget // bytes_of(kind.form)
        self._readers.do(partial(self._read, fetch, digests[:room]))
        fetch.ended.wait(_GLANCE_SECONDS)
        return fetch

    def _read(self, fetch: Fetch, digests: Sequence[bytes]) -> None:
        read = list[bytes]()
        try:
            for digest in digests:
                if fetch.stopped or not (found := self.files.read(fetch.kind, digest)):
                    break
                fetch.found.append((digest, *found))
                read.append(digest)
        except Exception:
            _LOG.exception("pages could not be read from file_cache")
        finally:
            fetch.ended.set()
        for digest in reversed(read):  # so that the ends of prefixes are the first files to go
            self.files.touch(fetch.kind, digest)

    def land(self, fetch: Fetch) -> int:
        """Put the pages that have come into the store; further pages come too late. Returns their number."""
        if not fetch.stopped:
            fetch.stopped = True
            self._late += not fetch.ended.is_set()
            pages, fetch.found = [*fetch.found], []
            if fetch.flushes == self._flushes:
                for digest, page, crc in reversed(pages):  # the ends of prefixes are the first to go
                    self._store.put(digest, page, crc)
                return len(pages)
        return 0

    def wait(self) -> None:
        """Wait a short time for a prompt's pages."""
        fetch = next((fetch for fetch in self._active if fetch.under_way), None)
        if fetch:
            fetch.ended.wait(_WAIT_SECONDS)

    def settle(self) -> None:
        """Wait until all pages that were handed over are written."""
        self._writer.finish()


_NO_KIND = PageKind(bytes(32), ())


def _first_look(files: PageFiles) -> None:
    try:
        files.look()
    except OSError as error:
        _LOG.warning(
            "file_cache: %s cannot be read (%s): no page comes from it", files.folder, error.strerror
        )
