"""Pages of an engine's prefix cache that go to other engines, or come from them. No jax here.

The engine's thread calls these functions between two steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_jax.decode.launches import ReadPages
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.store.page import Page, split


@dataclass(frozen=True)
class Missing:
    """The pages of a prompt that the prefix cache lacks.

    Attributes:
        digests: digests of all pages with which the prompt may begin.
        first: the number of the first missing page; the number of all pages if none is missing.
        flushes: number of flushes of the cache so far.
    """

    digests: Sequence[bytes]
    first: int
    flushes: int


def missing(engine: Engine, request: Request) -> Missing:
    """Pages of the prompt that the cache lacks, of a request that must not have been submitted yet.

    The engine must have a host tier.
    """
    assert engine.tier
    first = max(map(len, engine.scheduler.cached(request)))
    digests = request.residence.digests[: (len(request.prompt) - 1) // engine.config.page_size]
    return Missing(digests, first, engine.tier.flushes)


def copy_out(engine: Engine, digests: Sequence[bytes]) -> Callable[[], list[Page]]:
    """Read the pages of the first digests, up to the first that is missing.

    Any thread may call the returned function, which waits for them.
    """
    assert engine.tier
    found = [pool.match(digests) for pool in engine.scheduler.pools]
    shard = max(range(len(found)), key=lambda i: len(found[i]))
    pending = engine.runner.do(ReadPages(shard, tuple(found[shard]))) if found[shard] else None
    rest = engine.tier.get(digests[len(found[shard]) :])
    return lambda: [*(split(pending.read()) if pending else ()), *rest]


def take_in(engine: Engine, lacked: Missing, pages: Sequence[tuple[Page, int]]) -> None:
    """Put pages of another engine into the host tier, with their checksums, from ``lacked.first`` on.

    No page is taken if the cache was flushed meanwhile, as the pages may belong to other weights.
    """
    assert engine.tier
    if engine.tier.flushes == lacked.flushes:
        arrived = list(zip(lacked.digests[lacked.first :], pages, strict=False))
        for digest, (page, crc) in reversed(arrived):  # the ends of prefixes are the first to go
            engine.tier.store.put(digest, page, crc)
