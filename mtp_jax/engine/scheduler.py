"""Which request has which slot and pages, and what runs next. No jax here.

Invariant *free pages return*: when no request lives, every page is free.
"""

from collections import deque

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.pages import PageAllocator
from mtp_jax.engine.request import Request, Status


class Scheduler:
    """First come, first served: a request takes a slot and all the pages it can need, or waits."""

    def __init__(self, config: EngineConfig, shards: int) -> None:
        self.config, self.shards = config, shards
        self.slots_per_shard = config.max_num_seqs // shards
        self.allocator = PageAllocator(config.num_pages or self.slots_per_shard * config.columns, shards)
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * config.max_num_seqs

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or has a slot."""
        return bool(self.waiting) or any(self.slots)

    def live(self) -> list[Request]:
        """Requests that wait or have a slot."""
        return [*(r for r in self.slots if r), *self.waiting]

    def admit(self) -> list[Request]:
        """Give slots and pages to waiting requests, in order, as far as they go."""
        admitted = []
        while self.waiting and self._place(self.waiting[0]):
            request = self.waiting.popleft()
            request.status = Status.PREFILL
            self.slots[request.slot] = request
            admitted.append(request)
        return admitted

    def _place(self, request: Request) -> bool:
        """Take the lowest free slot whose shard has the pages: low slots keep the slot bucket small."""
        needed = self.config.pages_for(request.capacity)
        by_height = sorted(range(len(self.slots)), key=lambda slot: slot % self.slots_per_shard)
        for slot in by_height:
            if self.slots[slot] is None:
                pages = self.allocator.allocate(needed, self.shard_of(slot))
                if pages is not None:
                    request.slot, request.pages = slot, pages
                    return True
        return False

    def shard_of(self, slot: int) -> int:
        """The data shard that holds a slot and its pages."""
        return slot // self.slots_per_shard

    def prefilling(self) -> list[Request | None]:
        """Per data shard the oldest request whose prompt is not in the cache yet."""
        chosen: list[Request | None] = [None] * self.shards
        for request in sorted(filter(None, self.slots), key=lambda r: r.id):
            shard = self.shard_of(request.slot)
            if request.status is Status.PREFILL and chosen[shard] is None:
                chosen[shard] = request
        return chosen

    def running(self) -> list[Request]:
        """Requests that a step can advance: each unread step emits at least one token."""
        live = [r for r in self.slots if r and r.status is Status.RUNNING]
        return [r for r in live if len(r.output) + r.unread < r.max_tokens]

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and take back what it holds."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.slots[request.slot] = None
            self.allocator.release(request.pages, self.shard_of(request.slot))
            request.pages = []
        request.end(reason)
