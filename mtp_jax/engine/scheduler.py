"""Which request has which slot and pages, and what runs next. No jax here.

Invariant *free pages return*: when no request lives, every page is free or kept by the prefix cache.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.pages import PagePool, extend_digests
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.shards import Shard, preferred
from mtp_jax.store.page import Page
from mtp_jax.store.tier import HostTier, Restored


class Scheduler:
    """By priority, then first come, first served: a request takes a slot and pages for its prompt, or waits.

    Pages for its output come as it grows. When they run out, the request that would be served last gives its
    own back and waits for them again: preemption.

    Attributes:
        stale: whether slots or pages changed hands since the device was told, but for admissions.
        held: whether requests that have not begun stay in the queue, even past their deadlines.
        restoring: pages that the tier gave back. They are to be written before their requests are told to the
            device.
    """

    def __init__(self, config: EngineConfig, shards: int, tier: HostTier | None = None) -> None:
        """tier: where pages go that the pools forget."""
        self.config, self.shards, self.tier = config, shards, tier
        self.slots_per_shard = config.max_num_seqs // shards
        pages = config.pages_per_shard(shards)
        told = [partial(tier.evict, shard) if tier else None for shard in range(shards)]
        self.pools = [PagePool(pages, evicted) for evicted in told]
        self.restoring: list[Restored] = []
        self.waiting: list[Request] = []
        self.slots: list[Request | None] = [None] * config.max_num_seqs
        self.preemptions = 0
        self.stale = self.held = False

    @property
    def busy(self) -> bool:
        """Whether any request has a slot, or waits for one and is not held."""
        return self._next() is not None or any(self.slots)

    def _next(self) -> Request | None:
        """Whose turn it is to get a slot."""
        return next((r for r in self.waiting if not self.holds(r)), None)

    def holds(self, request: Request) -> bool:
        """Whether a request stays in the queue for as long as ``held`` says so."""
        return self.held and request.holdable and not request.begun

    def live(self) -> list[Request]:
        """Requests that wait or have a slot."""
        return [*(r for r in self.slots if r), *self.waiting]

    def enqueue(self, request: Request) -> None:
        """Let a request wait for its turn."""
        insort(self.waiting, request, key=_turn)

    def shard_of(self, slot: int) -> int:
        """The data shard that holds a slot and its pages."""
        return slot // self.slots_per_shard

    def _in_shard(self, shard: int) -> list[Request]:
        first = shard * self.slots_per_shard
        return [r for r in self.slots[first : first + self.slots_per_shard] if r]

    def _lowest_free(self) -> dict[int, int]:
        """The lowest free slot of each shard that has one."""
        return {self.shard_of(i): i for i, r in reversed([*enumerate(self.slots)]) if r is None}

    def pool_of(self, request: Request) -> PagePool:
        """Where the pages of a request that has a slot come from."""
        return self.pools[self.shard_of(request.slot)]

    # Admission

    def admit(self) -> list[Request]:
        """Give slots and pages to waiting requests, in order, as far as they go."""
        admitted = []
        # A preempted request is resumed from its newest token, so all its launches must have been read.
        while (request := self._next()) and not request.inflight and self._place(request):
            self.waiting.remove(request)
            request.status = Status.PREFILL
            self.slots[request.slot] = request
            admitted.append(request)
        return admitted

    def _place(self, request: Request) -> bool:
        """Take a free slot of the first shard, in the order of ``preferred``, that has the pages.

        Low slots come first: they keep the slot bucket small.
        """
        free = self._lowest_free()
        if not free:
            return False
        request.take_up()
        cached = self.cached(request)
        shards = [shard for shard in self.order(request, cached) if shard in free]
        return any(self._place_in(request, free[shard], cached[shard]) for shard in shards)

    def order(self, request: Request, cached: Sequence[Sequence[int | None]]) -> list[int]:
        """The shards in the order in which a request should try them. cached: see ``cached``."""
        shards = []
        for i, (pool, found) in enumerate(zip(self.pools, cached, strict=True)):
            held = self._in_shard(i)
            pages = sum(len(r.pages) for r in held)
            shards.append(Shard(len(held), pages, pool.available, len(found), found.count(None)))
        return preferred(shards, self.config.pages_for(len(request.tokens) + request.spare))

    def looks_up(self, request: Request) -> bool:
        """Whether it may begin with cached pages: log-probabilities of the prompt need all of it computed."""
        return self.config.prefix_cache and request.params.prompt_logprobs is None

    def cached(self, request: Request) -> list[list[int | None]]:
        """Per shard, the cached pages of the request's first tokens; None: the host's memory has the page.

        At least one token is left to compute: its hidden state gives the first logits.
        """
        if not self.looks_up(request):
            return [[] for _ in self.pools]
        extend_digests(request.digests, request.salt, request.tokens, self.config.page_size)
        known = request.digests[: (len(request.tokens) - 1) // self.config.page_size]
        return [list(self._found(pool, known)) for pool in self.pools]

    def _found(self, pool: PagePool, digests: Sequence[bytes]) -> Iterator[int | None]:
        for digest in digests:
            page = pool.find(digest)
            if page is None and not (self.tier and self.tier.has(digest)):
                return
            yield page

    def _place_in(self, request: Request, slot: int, cached: list[int | None]) -> bool:
        shard = self.shard_of(slot)
        pool, shared = self.pools[shard], [page for page in cached if page is not None]
        pool.share(shared)
        fresh = self.config.pages_for(len(request.tokens) + request.spare) - len(shared)
        # A page more for whoever may need one soon: a request admitted too early would be preempted at once.
        growing = sum(len(r.pages) < self.config.pages_for(r.capacity) for r in self._in_shard(shard))
        absent = [digest for digest, page in zip(request.digests, cached, strict=False) if page is None]
        fits, contents = fresh + growing <= pool.available, list[Page]()
        if fits and absent and self.tier:
            contents = self.tier.get(absent)
            fits = len(contents) == len(absent)  # else one was damaged, or has gone: try a shorter prefix
        pages = pool.allocate(fresh) if fits else None
        if pages is None:
            pool.release(shared)
            return False
        for page, digest, content in zip(pages, absent, contents, strict=False):
            pool.register(page, digest)
            self.restoring.append((shard, page, content))
        new = iter(pages)
        request.slot, request.pages = slot, [*(next(new) if p is None else p for p in cached), *new]
        request.prefilled = len(cached) * self.config.page_size
        request.restored = len(absent) * self.config.page_size
        request.registered = len(cached)
        return True

    def pack(self, bucket: Callable[[int], int]) -> list[tuple[int, int]]:
        """Move requests down into free slots if a smaller step does for those that are left.

        bucket: slots of the smallest step that reaches so many. Returns (from, to). Not across data shards.
        """
        moves = []
        while self.shards == 1 and not self.waiting and any(self.slots):
            top = max(i for i, r in enumerate(self.slots) if r)
            count = sum(r is not None for r in self.slots)
            if bucket(count) == bucket(top + 1):
                break
            free, request = self.slots.index(None), self.slots[top]
            assert request is not None
            self.slots[free], self.slots[top], request.slot = request, None, free
            moves.append((top, free))
        return moves

    # What runs

    def prefilling(self) -> list[list[Request]]:
        """Per data shard the requests to prefill, the next one first."""
        return [
            sorted((r for r in self._in_shard(shard) if r.status is Status.PREFILL), key=_turn)
            for shard in range(self.shards)
        ]

    def running(self) -> list[Request]:
        """Requests that a step can advance: each unread step emits at least one token."""
        live = [r for r in self.slots if r and r.status is Status.RUNNING]
        return [r for r in live if len(r.output) + r.unread < r.max_tokens]

    def grow(self, running: Iterable[Request], depth: int) -> bool:
        """Give each its pages for a step of ``depth`` drafts, preempting others for them.

        Returns whether pages or slots changed hands, which makes the device ``stale``.
        """
        changed = False
        for request in sorted(running, key=_turn):
            drafts = min(depth, request.depth)
            needed = self.config.pages_for_step(request.rows_bound, drafts, request.capacity)
            while request.slot >= 0 and len(request.pages) < needed:
                changed = True
                pages = self.pool_of(request).allocate(needed - len(request.pages))
                if pages is not None:
                    request.pages += pages
                else:
                    self._preempt(max(self._in_shard(self.shard_of(request.slot)), key=_turn))
        self.stale |= changed
        return changed

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.slot, request.status = -1, Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.enqueue(request)

    # What is left behind

    def committed(self, request: Request, rows: int) -> None:
        """``rows`` of the request's cache are known to be complete, and their tokens are known."""
        if not self.config.prefix_cache or request.slot < 0:
            return
        full = rows // self.config.page_size
        if full > request.registered:
            tokens = [*request.prompt, *request.output]
            extend_digests(request.digests, request.salt, tokens, self.config.page_size)
            for i in range(request.registered, full):
                self.pool_of(request).register(request.pages[i], request.digests[i])
            request.registered = full

    def broken(self, request: Request) -> None:
        """NaN came out of the request's cache: nobody else may begin with its pages."""
        if request.slot >= 0:
            self.pool_of(request).forget(request.pages)
            if self.tier:
                self.tier.forget(request.digests)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and take back what it holds. Raises ValueError for none of these."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._vacate(request)
        request.end(reason)

    def _vacate(self, request: Request) -> None:
        if request.slot < 0 or self.slots[request.slot] is not request:
            raise ValueError(f"request {request.id} is not in a slot")
        self.pool_of(request).release(request.pages)
        self.slots[request.slot] = None
        request.pages = []


def _turn(request: Request) -> tuple[int, int]:
    """Whose turn it is first: the lower priority number, then the older request."""
    return request.priority, request.id
