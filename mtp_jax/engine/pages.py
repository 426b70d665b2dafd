"""The page allocator: free lists of cache pages, one per data shard."""

from mtp_jax.errors import ConfigError


class PageAllocator:
    """Hands out page numbers local to a data shard. Invariant: with no live request every page is free."""

    def __init__(self, pages: int, shards: int = 1) -> None:
        if pages < 1:
            raise ConfigError(f"num_pages = {pages}; expected at least 1")
        self.pages = pages
        self._free = [list(range(pages - 1, -1, -1)) for _ in range(shards)]

    def free(self, shard: int = 0) -> int:
        """Pages that ``shard`` can still hand out."""
        return len(self._free[shard])

    def allocate(self, count: int, shard: int = 0) -> list[int] | None:
        """``count`` pages, or None if the shard has fewer."""
        if count > len(self._free[shard]):
            return None
        return [self._free[shard].pop() for _ in range(count)]

    def release(self, pages: list[int], shard: int = 0) -> None:
        """Give pages back. Raises ValueError if one is free already."""
        twice = set(pages) & set(self._free[shard])
        if twice or len(set(pages)) != len(pages):
            raise ValueError(f"pages {sorted(twice) or pages} released twice")
        self._free[shard].extend(reversed(pages))
