"""The choice of a data shard for a request. No jax here.

A step lasts as long as its fullest shard takes, so rows and the pages they read are to lie evenly. A shard
whose cache has the beginning of a prompt saves computing it. Both hold as in consistent hashing with bounded
loads (arXiv 1608.01350): the longest hit decides, but only among the shards that are not much fuller than the
mean. A prefix that many requests share is then computed on every shard once, and found there from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 1.1
"""A shard with more than this multiple of the mean load gets no request for the sake of a hit."""


@dataclass(frozen=True)
class Shard:
    """Facts about a data shard, and about one request there.

    Attributes:
        rows: number of requests that have a slot.
        pages: number of pages that these requests read; a page that n of them share counts n times.
        free: number of pages that can be handed out.
        found: number of the prompt's first pages that are cached, on the device or in the host's memory.
        restored: number of the found pages that are in the host's memory.
    """

    rows: int
    pages: int
    free: int
    found: int = 0
    restored: int = 0


def preferred(shards: Sequence[Shard], pages: int) -> list[int]:
    """The shards in the order in which a request that will read ``pages`` should try them.

    A shard's load is its share of all rows, or of all pages read, the larger of both, the request's own
    counted among all; 1 is the mean. The best is the shard with the longest hit among shards of at most 1.1,
    then the one that brings fewest pages back from the host, then the least loaded, then the one with most
    free pages. Shards of a higher load come last, the least loaded first.
    """
    count = len(shards)
    all_rows, all_pages = 1 + sum(s.rows for s in shards), pages + sum(s.pages for s in shards)

    def order(shard: int) -> tuple[float, ...]:
        s = shards[shard]
        load = count * max(s.rows / all_rows, s.pages / max(all_pages, 1))
        hit = (0, 0) if load > _MOST else (-s.found, s.restored)
        return (load > _MOST, *hit, load, -s.free, shard)

    return sorted(range(count), key=order)
