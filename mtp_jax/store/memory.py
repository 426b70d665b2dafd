"""A store of pages in the host's memory, by digest."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

from mtp_jax.store.page import Page, checksum, size


class MemoryStore:
    """Keeps the pages used last, by the digest of all tokens up to their end. Any thread may use it.

    ``get`` marks the last page of a prefix as used first, so that prefixes lose their ends first.

    Attributes:
        budget: most bytes of pages.
        held: bytes of the pages that are kept.
        stored: number of pages that were kept so far.
        dropped: number of pages that were lost, by reason: "room", which other pages needed, or "damaged".
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.held, self.stored = budget, 0, 0
        self.dropped: Counter[str] = Counter()
        self._lock = Lock()
        # Pages with checksums, the next to go first.
        self._kept: OrderedDict[bytes, tuple[Page, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: object) -> bool:
        return digest in self._kept

    def get(self, digests: Sequence[bytes]) -> list[Page]:
        """The pages of these digests, up to the first digest whose page is missing or damaged.

        A damaged page is dropped.
        """
        pages: list[Page] = []
        for digest in digests:
            kept = self._kept.get(digest)
            if kept is None:
                break
            page, crc = kept
            if checksum(page) != crc:
                self._drop(digest, "damaged")
                break
            pages.append(page)
        self.used(reversed(digests[: len(pages)]))
        return pages

    def peek(self, digest: bytes) -> tuple[Page, int] | None:
        """A page and its checksum, not compared; None if it is missing. It does not count as used."""
        return self._kept.get(digest)

    def put(self, digest: bytes, page: Page, crc: int | None = None) -> None:
        """Keep a page, whose arrays must not change any more, unless it is larger than the budget.

        crc: its checksum; None: not known.
        """
        crc, needed = checksum(page) if crc is None else crc, size(page)
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return
            if needed > self.budget:
                self.dropped["room"] += 1
                return
            while self.held + needed > self.budget:
                _, (oldest, _) = self._kept.popitem(last=False)
                self.held -= size(oldest)
                self.dropped["room"] += 1
            self._kept[digest] = page, crc
            self.held += needed
            self.stored += 1

    def used(self, digests: Iterable[bytes]) -> None:
        """Mark the pages of these digests as used, the last digest as the latest."""
        with self._lock:
            for digest in digests:
                if digest in self._kept:
                    self._kept.move_to_end(digest)

    def forget(self, digests: Iterable[bytes] | None = None) -> None:
        """Drop these pages; None: all pages."""
        for digest in list(self._kept) if digests is None else digests:
            self._drop(digest)

    def _drop(self, digest: bytes, reason: str | None = None) -> None:
        with self._lock:
            if kept := self._kept.pop(digest, None):
                self.held -= size(kept[0])
                if reason:
                    self.dropped[reason] += 1
