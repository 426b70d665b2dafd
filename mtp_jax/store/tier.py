"""The host's memory as a second tier of the prefix cache: pages go there when the device's pool forgets them.

    PagePool.allocate -> evict -> launch: one ReadPages -> (thread) copied, filed under its digest
    Scheduler: a page of a prompt that is in no pool -> has, get -> write: one WritePages, before the prefill

Where there are files below it (``file_tier.py``), pages go to the host's memory also when a request leaves
them, a few with each launch, and from there to files.

A page that is forgotten still holds its rows until the next program that writes to pages. So the runner calls
``launch`` before any such program. The device runs programs in order, and a thread waits for the copy; the
engine waits only where too many copies are in flight.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from mtp_jax.decode.arrays import PageData
from mtp_jax.decode.launches import Pending, ReadPages, Runner, WritePages
from mtp_jax.store.file_tier import FilesOf, FileStats, FileTier
from mtp_jax.store.memory import MemoryStore
from mtp_jax.store.page import Page, join, split
from mtp_jax.store.page_files import PageForm, PageKind, form_of

_LOG = logging.getLogger(__name__)

# Numbers of pages that one launch reads, and of launches in flight: their results take memory on the device.
_PAGES, _FLIGHTS = 8, 4


@dataclass(frozen=True)
class TierStats:
    """A snapshot of a tier: its contents, and its totals.

    Attributes:
        pages: number of pages that the store holds.
        bytes: bytes of these pages.
        stored: number of pages that the store has taken so far.
        restored: number of pages that were written back to the device so far.
        dropped: number of pages lost, by reason: "room", "damaged", or "memory" where the host had none.
        files: the tier of files.
    """

    pages: int = 0
    bytes: int = 0
    stored: int = 0
    restored: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    files: FileStats = field(default_factory=FileStats)


def host_tier(runner: Runner, budget: int, files: FilesOf | None) -> "HostTier | None":
    """The tier of an engine, None without a budget. files: None: it has no files. Raises ConfigError."""
    if not budget:
        return None
    return HostTier(MemoryStore(budget), runner, files)


Restored = tuple[int, int, Page]
"""A data shard, one of its pages, and the content to be written there."""


class HostTier:
    """Moves pages between an engine's pools and a store. One thread, the engine's, owns it.

    Attributes:
        restored: number of pages that were written back to the device so far.
        flushes: number of times that ``forget`` forgot all pages.
        lost: number of pages that could not be filed, as the host had no memory for them.
        files: the tier of files below; None: there is none.
    """

    def __init__(self, store: MemoryStore, runner: Runner, files: FilesOf | None = None) -> None:
        """Raises ConfigError for a folder that cannot be used."""
        self.store, self._runner = store, runner
        self.files = FileTier(files, store, self._form) if files else None
        self.restored = self.lost = self.flushes = 0
        # Data shard and page of each evicted page that is not read yet, by digest.
        self._evicted: dict[bytes, tuple[int, int]] = {}
        # The same of pages that were left, and are still in their pool.
        self._left: dict[bytes, tuple[int, int]] = {}
        self._arriving: dict[bytes, Future[None]] = {}
        self._flights: deque[tuple[Future[None], Sequence[bytes]]] = deque()
        self._thread = ThreadPoolExecutor(1, "pages")  # one thread, so that pages are filed in order
        runner.before_writing.append(self.launch)

    def stats(self) -> TierStats:
        """The contents of the tier now, and its totals. Any thread may ask."""
        dropped = dict(self.store.dropped)
        if self.lost:
            dropped["memory"] = self.lost
        files = self.files.stats() if self.files else FileStats()
        return TierStats(len(self.store), self.store.held, self.store.stored, self.restored, dropped, files)

    def _form(self) -> PageForm:
        """The form of the engine's pages."""
        (page,) = split(self._runner.do(ReadPages(0, (0,))).read())
        return form_of(page)

    # Out

    def evict(self, shard: int, page: int, digest: bytes) -> None:
        """A pool has just forgotten this page of a data shard."""
        self._left.pop(digest, None)
        if digest in self.store:
            self.store.used([digest])
        elif digest not in self._arriving:
            self._evicted[digest] = shard, page

    def leave(self, shard: int, pages: Sequence[tuple[int, bytes]]) -> None:
        """A request has left these pages of a data shard, in order; files are to have them."""
        if self.files is None or (kind := self.files.kind()) is None:
            return
        for page, digest in reversed(pages):  # the ends of prefixes are the first to go
            if digest in self.store:
                self.files.save(kind, digest)
            elif digest not in self._arriving and digest not in self._evicted:
                self._left[digest] = shard, page

    def launch(self) -> None:
        """Launch the reads of all evicted pages, and of a few pages that were left."""
        self._landed()
        evicted, self._evicted = self._evicted, {}
        self._read(evicted)
        if len(self._flights) < _FLIGHTS:
            self.save()

    def save(self) -> bool:
        """Launch the reads of a few pages that were left. Returns whether there are more."""
        some = list(islice(self._left, _PAGES))
        self._read({digest: self._left.pop(digest) for digest in some})
        return bool(self._left)

    def _read(self, where: Mapping[bytes, tuple[int, int]]) -> None:
        """Launch the reads of pages, by digest."""
        by_shard: dict[int, list[tuple[int, bytes]]] = {}
        for digest, (shard, page) in where.items():
            by_shard.setdefault(shard, []).append((page, digest))
        for shard, found in by_shard.items():
            for i in range(0, len(found), _PAGES):
                pages, digests = zip(*found[i : i + _PAGES], strict=True)
                self._fly(shard, pages, digests)

    def _fly(self, shard: int, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        if len(self._flights) >= _FLIGHTS:
            self._flights[0][0].result()
            self._landed()
        pending = self._runner.do(ReadPages(shard, tuple(pages)))
        future = self._thread.submit(self._file, digests, pending, self.files and self.files.kind())
        self._flights.append((future, digests))
        self._arriving |= dict.fromkeys(digests, future)

    def _file(self, digests: Sequence[bytes], pending: Pending[PageData], kind: PageKind | None) -> None:
        """kind: the kind of the pages, where files are to have them."""
        try:
            for digest, page in zip(digests, split(pending.read()), strict=True):
                self.store.put(digest, page)
                if kind and self.files:
                    self.files.save(kind, digest)
        except MemoryError:
            self.lost += len(digests)
            _LOG.warning("no memory for pages of the prefix cache; lower host_cache_gib")

    def _landed(self) -> None:
        """Take note of the copies that have ended. Raises the error of a copy that failed."""
        while self._flights and self._flights[0][0].done():
            future, digests = self._flights.popleft()
            for digest in digests:
                del self._arriving[digest]
            future.result()

    # In

    def has(self, digest: bytes) -> bool:
        """Whether ``get`` will most probably find this page."""
        return digest in self._evicted or digest in self._arriving or digest in self.store

    def get(self, digests: Sequence[bytes]) -> list[Page]:
        """The pages of these digests, up to the first digest whose page is damaged or has gone.

        Waits for copies that are on their way.
        """
        if any(digest in self._evicted for digest in digests):
            self.launch()
        for digest in digests:
            if digest in self._arriving:
                self._arriving[digest].result()
        self._landed()
        return self.store.get(digests)

    def write(self, restored: Iterable[Restored]) -> None:
        """Write pages from ``get`` into pages of the device."""
        by_shard: dict[int, list[tuple[int, Page]]] = {}
        for shard, page, content in restored:
            by_shard.setdefault(shard, []).append((page, content))
        for shard, found in by_shard.items():
            pages = tuple(page for page, _ in found)
            self._runner.do(WritePages(shard, pages, join([content for _, content in found])))
            self.restored += len(pages)

    def forget(self, digests: Iterable[bytes] | None = None) -> None:
        """Forget these pages; None: all pages that were evicted so far."""
        gone = None if digests is None else list(digests)
        self.flushes += gone is None
        for waiting in (self._evicted, self._left):
            for digest in list(waiting) if gone is None else gone:
                waiting.pop(digest, None)
        for future, _ in self._flights:
            future.result()
        self._landed()
        if self.files and gone is None:
            self.files.flushed()
        elif self.files and gone:
            self.files.forget(gone)
        self.store.forget(gone)
