"""The scheduler: gives slots and pages to requests, and chooses the next request. No jax here.

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
    """Gives requests a slot and pages for their prompts, by priority, then in the order of arrival.

    Pages for its output come as it grows. When pages run out, the scheduler preempts the request that would
    be served last: its pages are taken back, and it waits.

    Attributes:
        held: whether requests that have not begun stay in the queue, even past their deadlines.
        paused: whether all requests do.
    """

    def __init__(
        self,
        config: EngineConfig,
        shards: int,
        tier: HostTier | None = None,
        leaves: Callable[[Request], object] | None = None,
    ) -> None:
        """tier: the host tier, which takes pages that the pools evict.

        leaves: called with a request that is about to give its slot and pages back.
        """
        self.config, self.shards, self.tier, self._leaves = config, shards, tier, leaves
        self.slots_per_shard = config.max_num_seqs // shards
        pages = config.pages_per_shard(shards)
        evictions = [partial(tier.evict, shard) if tier else None for shard in range(shards)]
        self.pools = [PagePool(pages, evicted) for evicted in evictions]
        self._restoring: list[Restored] = []
        self.waiting: list[Request] = []
        self.slots: list[Request | None] = [None] * config.max_num_seqs
        self.preemptions = 0
        self._stale = self.held = self.paused = False

    @property
    def busy(self) -> bool:
        """Whether any request has a slot, or waits for one and is not held."""
        return any(not self.holds(r) for r in self.waiting) or any(self.slots)

    def _next(self) -> Request | None:
        """The waiting request that gets the next slot; requests that wait for pages from files do not."""
        return next((r for r in self.waiting if not self.holds(r) and not r.residence.fetching), None)

    def holds(self, request: Request) -> bool:
        """Whether a request stays in the queue, because of ``held`` or ``paused``."""
        return request.holdable and (self.paused or (self.held and not request.begun))

    def live(self) -> list[Request]:
        """Requests that wait or have a slot."""
        return [*(r for r in self.slots if r), *self.waiting]

    def enqueue(self, request: Request) -> None:
        """Add a request to the queue."""
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
        """The page pool of a request that has a slot."""
        return self.pools[self.shard_of(request.residence.slot)]

    # Admission

    def admit(self) -> list[Request]:
        """Give slots and pages to waiting requests, in order, as far as they go; have restored pages written.

        The caller admits the requests on the device after that.
        """
        admitted = []
        # A preempted request is resumed from its newest token, so all its launches must have been read.
        while (request := self._next()) and not request.progress.inflight:
            if self.slots.count(None) <= self._promised:
                break
            if self._fetches(request):
                continue
            if not self._place(request):
                break
            self.waiting.remove(request)
            self.slots[request.residence.slot] = request
            admitted.append(request)
        if self.tier:
            self.tier.write(self._restoring)
            self._restoring.clear()
            if self.tier.files and not any(self.slots):
                self.tier.files.wait()
        return admitted

    @property
    def _promised(self) -> int:
        """Number of free slots for requests that wait for pages from files."""
        return self.tier.files.waiting if self.tier and self.tier.files else 0

    def _fetches(self, request: Request) -> bool:
        """Begin to fetch pages of a request from files, or take them. Returns whether it waits for them."""
        own, files = request.residence, self.tier and self.tier.files
        if not files:
            return False
        if own.fetch is None:
            found = max(map(len, self.cached(request)))
            own.fetch = files.fetch(self._known(request)[found:])
            if own.fetching:
                return True
        own.fetched += files.land(own.fetch) * self.config.page_size
        return False

    def _place(self, request: Request) -> bool:
        """Take a free slot of the first shard, in the order of ``preferred``, that has the pages.

        Low slots come first: they keep the slot bucket small.
        """
        free = self._lowest_free()
        if not free:
            return False
        cached = self.cached(request)
        shards = [shard for shard in self.order(request, cached) if shard in free]
        return any(self._place_in(request, free[shard], cached[shard]) for shard in shards)

    def order(self, request: Request, cached: Sequence[Sequence[int | None]]) -> list[int]:
        """The shards in the order in which a request should try them. cached: see ``cached``."""
        shards = []
        for i, (pool, found) in enumerate(zip(self.pools, cached, strict=True)):
            held = self._in_shard(i)
            pages = sum(len(r.residence.pages) for r in held)
            shards.append(Shard(len(held), pages, pool.available, len(found), found.count(None)))
        return preferred(shards, self.config.pages_for(len(request.residence.tokens) + request.spare))

    def looks_up(self, request: Request) -> bool:
        """Whether a request may begin with cached pages; log-probabilities of the prompt forbid it."""
        return self.config.prefix_cache and request.params.prompt_logprobs is None

    def cached(self, request: Request) -> list[list[int | None]]:
        """Per shard, the cached pages of the request's first tokens; None: the host's memory has the page.

        The request must not have a slot. At least one token is left to compute, whose hidden state gives the
        first logits.
        """
        own = request.residence
        own.take_up(request.prompt, request.progress.output)
        if not self.looks_up(request):
            return [[] for _ in self.pools]
        extend_digests(own.digests, request.salt, own.tokens, self.config.page_size)
        known = self._known(request)
        return [list(self._found(pool, known)) for pool in self.pools]

    def _known(self, request: Request) -> list[bytes]:
        """Digests of the pages with which a request may begin, once ``cached`` was asked."""
        own = request.residence
        return own.digests[: (len(own.tokens) - 1) // self.config.page_size] if self.looks_up(request) else []

    def _found(self, pool: PagePool, digests: Sequence[bytes]) -> Iterator[int | None]:
        for digest in digests:
            page = pool.find(digest)
            if page is None and not (self.tier and self.tier.has(digest)):
                return
            yield page

    def _place_in(self, request: Request, slot: int, cached: list[int | None]) -> bool:
        shard, own = self.shard_of(slot), request.residence
        pool, shared = self.pools[shard], [page for page in cached if page is not None]
        pool.share(shared)
        fresh = self.config.pages_for(len(own.tokens) + request.spare) - len(shared)
        # Keep a page for each request that may need one soon: a request admitted too early would be preempted
        # at once.
        growing = sum(
            len(r.residence.pages) < self.config.pages_for(r.capacity) for r in self._in_shard(shard)
        )
        absent = [digest for digest, page in zip(own.digests, cached, strict=False) if page is None]
        fits, contents = fresh + growing <= pool.available, list[Page]()
        if fits and absent and self.tier:
            contents = self.tier.get(absent)
            fits = len(contents) == len(absent)  # else a page was damaged, or has gone: try a shorter prefix
        pages = pool.allocate(fresh) if fits else None
        if pages is None:
            pool.release(shared)
            return False
        for page, digest, content in zip(pages, absent, contents, strict=False):
            pool.register(page, digest)
            self._restoring.append((shard, page, content))
        new = iter(pages)
        own.slot, own.pages = slot, [*(next(new) if p is None else p for p in cached), *new]
        own.prefilled = len(cached) * self.config.page_size
        own.restored = len(absent) * self.config.page_size
        own.registered = len(cached)
        return True

    def pack(self, bucket: Callable[[int], int]) -> list[tuple[int, int]]:
        """Move requests down into free slots if a smaller step can then serve the running requests.

        bucket: slots of the smallest step that reaches n slots. Returns (from, to). Not across data shards.
        """
        moves = []
        while self.shards == 1 and not self.waiting and any(self.slots):
            top = max(i for i, r in enumerate(self.slots) if r)
            count = sum(r is not None for r in self.slots)
            if bucket(count) == bucket(top + 1):
                break
            free, request = self.slots.index(None), self.slots[top]
            assert request is not None
            self.slots[free], self.slots[top], request.residence.slot = request, None, free
            moves.append((top, free))
        return moves

    # Running

    def prefilled(self, prompts: Iterable[Request], tokens: int) -> None:
        """Record that a launch has taken the next ``tokens`` tokens of these prompts along, or all left."""
        for own in (r.residence for r in prompts):
            own.prefilled = own.prefilled_after(tokens)

    def prefilling(self) -> list[list[Request]]:
        """The requests to prefill, per data shard, the next request first."""
        return [
            sorted((r for r in self._in_shard(shard) if r.status is Status.PREFILL), key=_turn)
            for shard in range(self.shards)
        ]

    def running(self) -> list[Request]:
        """Requests that a step can advance: each unread step emits at least one token."""
        live = [r for r in self.slots if r and r.status is Status.RUNNING]
        return [r for r in live if len(r.progress.output) + r.progress.unread < r.max_tokens]

    def grow(self, running: Iterable[Request], depth: int) -> bool:
        """Give each request the pages for a step of ``depth`` drafts, preempting other requests if needed.

        Returns whether pages or slots changed hands.
        """
        changed = False
        for request in sorted(running, key=_turn):
            drafts = min(depth, request.depth)
            needed = self.config.pages_for_step(request.progress.rows_bound, drafts, request.capacity)
            while request.residence.slot >= 0 and len(request.residence.pages) < needed:
                changed = True
                pages = self.pool_of(request).allocate(needed - len(request.residence.pages))
                if pages is not None:
                    request.residence.pages += pages
                else:
                    self._preempt(max(self._in_shard(self.shard_of(request.residence.slot)), key=_turn))
        self._stale |= changed
        return changed

    def _preempt(self, request: Request) -> None:
        self._retract(request)
        request.residence.preemptions += 1
        self.preemptions += 1

    def _retract(self, request: Request) -> None:
        self._vacate(request)
        own = request.residence
        own.slot, own.fetch, own.fetched = -1, None, 0
        self.enqueue(request)

    def pause(self) -> None:
        """Put all requests back into the queue, where they stay while ``paused`` is set.

        Their launches must have been read. Their full pages stay as a prefix for as long as there is room.
        """
        for request in [r for r in self.slots if r]:
            self._retract(request)
            self._stale = True
        self.paused = True

    def unpause(self) -> None:
        """Serve the requests that ``pause`` put back."""
        self.paused = False

    # Leaving

    def committed(self, request: Request, rows: int) -> None:
        """Register full pages: ``rows`` rows of the cache are complete, and their tokens known."""
        if not self.config.prefix_cache or request.residence.slot < 0:
            return
        own, full = request.residence, rows // self.config.page_size
        if full > own.registered:
            tokens = [*request.prompt, *request.progress.output]
            extend_digests(own.digests, request.salt, tokens, self.config.page_size)
            for i in range(own.registered, full):
                self.pool_of(request).register(own.pages[i], own.digests[i])
            own.registered = full

    def broken(self, request: Request) -> None:
        """Forget the pages of a request whose cache gave NaN, so that no other request begins with them.

        A later chunk may have been healthy, and have activated the slot.
        """
        self._stale = True
        if request.residence.slot >= 0:
            self.pool_of(request).forget(request.residence.pages)
            if self.tier:
                self.tier.forget(request.residence.digests)

    def release(self, request: Request, known: bool = True) -> None:
        """Take back a request's slot and pages, or its place in the queue. Raises ValueError if it has none.

        known: whether the device has ended the request itself.
        """
        if request.residence.slot < 0:
            self.waiting.remove(request)
            if request.residence.fetch:
                request.residence.fetch.stopped = True
        else:
            self._vacate(request)
            self._stale |= not known

    def changed(self) -> bool:
        """Whether slots or pages changed hands since the last call, but for admissions."""
        changed, self._stale = self._stale, False
        return changed

    def _vacate(self, request: Request) -> None:
        if request.residence.slot < 0 or self.slots[request.residence.slot] is not request:
            raise ValueError(f"request {request.id} is not in a slot")
        if self._leaves:
            self._leaves(request)
        own, pool = request.residence, self.pool_of(request)
        if self.tier and self.tier.files:
            known = ((pool.find(digest), digest) for digest in own.digests[: own.registered])
            self.tier.leave(self.shard_of(own.slot), [(p, digest) for p, digest in known if p is not None])
        pool.release(own.pages)
        self.slots[own.slot] = None
        own.pages = []


def _turn(request: Request) -> tuple[int, int]:
    """The sort key of the queue: the lower priority number, then the older request."""
    return request.priority, request.id
