"""The pages of one data shard: free, in use by requests, or kept by the prefix cache. No jax here.

A full, computed page is registered under a digest of all tokens up to its end. When no request uses it any
more, it stays until its room is needed; the least recently used page goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import numpy as np

from mtp_jax.errors import ConfigError

MOST_PAGES = 2**22
"""Most pages of a data shard: the host's records of them fit in a few hundred MB."""


class PagePool:
    """Hands out page numbers. Invariant: with no live request every page is free or kept as a prefix."""

    def __init__(self, pages: int, evicted: Callable[[int, bytes], None] | None = None) -> None:
        """evicted: called with each page that ``allocate`` forgets, and its digest, before its new use."""
        if not 1 <= pages <= MOST_PAGES:
            raise ConfigError(f"num_pages = {pages}; expected an integer from 1 to {MOST_PAGES}")
        self.pages, self._evicted = pages, evicted
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # Cached pages that no request uses, in the order in which they are evicted.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that ``allocate`` can hand out, unused cached pages included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Number of pages that the prefix cache keeps and no request uses."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages for one user, or None if there are fewer."""
        if count > self.available:
            return None
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            digest = self._forget(page)
            if self._evicted:
                self._evicted(page, digest)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def find(self, digest: bytes) -> int | None:
        """The cached page of a digest."""
        return self._page_of.get(digest)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The cached pages of the first digests, up to the first digest without a cached page."""
        pages = []
        for digest in digests:
            page = self.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to pages that ``find`` or ``match`` found."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Take back the pages of a user. Raises ValueError if one has no user."""
        unused = [p for p in pages if not self._users[p]]
        if unused or len(set(pages)) != len(pages):
            raise ValueError(f"pages {unused or pages} released twice")
        # From the end: the longest prefixes are the first to go.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._digest_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Let later requests find a full page, unless it or a copy of it is known already."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def forget(self, pages: Iterable[int] | None = None) -> None:
        """Let ``find`` return these pages (None: any page) no longer; their users keep them."""
        for page in list(self._digest_of) if pages is None else pages:
            if page in self._digest_of:
                self._forget(page)
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def _forget(self, page: int) -> bytes:
        digest = self._digest_of.pop(page)
        del self._page_of[digest]
        return digest


def extend_digests(digests: list[bytes], salt: str, tokens: Sequence[int], page_size: int) -> None:
    """Append the digests of further full pages of ``tokens``: SHA-256 over (salt, parent, tokens)."""
    parent = digests[-1] if digests else sha256(salt.encode()).digest()
    while (len(digests) + 1) * page_size <= len(tokens):
        begin = len(digests) * page_size
        page = np.asarray(tokens[begin : begin + page_size], "<i4").tobytes()
        parent = sha256(parent + page).digest()
        digests.append(parent)
