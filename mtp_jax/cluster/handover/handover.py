"""Prefill apart from decode: one server fills the prefix cache of another, page by page, by digest.

    decode:  submit -> which pages are missing -> Peers.fetch -> the host tier -> the request as usual
    prefill: PageServer -> the prompt for one token -> its pages out of the prefix cache, a few at a time

A page that does not come is computed, so that no fault of a hand-over makes a request fail.
"""

import asyncio
import hashlib
import secrets
import socket
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from mtp_jax.api.async_llm import AsyncLLM
from mtp_jax.api.hooks import MetricTotals
from mtp_jax.api.identity import facts_of_pages
from mtp_jax.cluster.handover.client import Peers, Wanted
from mtp_jax.cluster.handover.options import HandoverOptions, address
from mtp_jax.cluster.handover.pages import copy_out, missing, take_in
from mtp_jax.cluster.handover.pages_protocol import Prefill
from mtp_jax.cluster.handover.server import PageServer
from mtp_jax.decode.launches import ReadPages
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.store.page import Page, split
from mtp_jax.wire.connection import WireError

# Pages read at a time; prompts fetched at a time.
_PAGES, _FETCHES = 8, 16
_LONGEST_SALT = 2**10  # a salt travels in a header of bounded size
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, num_speculative_tokens=0)
_T = TypeVar("_T")


class Handover:
    """Sends pages of an ``AsyncLLM`` to other servers, or takes pages of theirs. Make it before the start."""

    def __init__(self, allm: AsyncLLM, options: HandoverOptions) -> None:
        """Binds the port of a server that prefills. Raises ConfigError."""
        self._allm, self._engine, self._options = allm, allm.llm.engine, options
        if not options.apart:
            raise ConfigError("role = 'both' hands nothing over; give 'prefill' or 'decode'")
        if not self._engine.tier:
            raise ConfigError(f"role = {options.role!r} needs host_cache_gib above 0: pages pass through it")
        self._weights = allm.llm.identify()
        self._like = Page()
        self._threads = ThreadPoolExecutor(_FETCHES, "fetch")
        self.peers: Peers | None = None
        self.server: PageServer | None = None
        own = options.credentials()
        if options.role == "decode":
            self.peers = Peers([address(peer) for peer in options.peers], own)
            allm.hooks.before_submit.append(partial(self.fetch, self.peers))
        else:
            most = self._engine.config.max_model_len
            listener = _listen(options.peer_address)
            self.server = PageServer(listener, own, most, self.identity, self._pages)
        allm.hooks.at_start.append(self._start)
        allm.hooks.at_close.append(self._stop)
        allm.hooks.counters.append(self.counters)

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        read = partial(self._engine.runner.do, ReadPages(0, (0,)))
        (self._like,) = split((await self._allm.on_engine(read)).read())
        await self._allm.off_loop(self._weights.wait)
        if self.server:
            self.server.start()

    def _stop(self) -> None:
        if self.server:
            self.server.stop()
        self._threads.shutdown(wait=False)

    def describe(self) -> str:
        """The role in a line of the log."""
        options = self._options
        asked = [options.peer_address] if self.server else options.peers
        bare = options.is_plain(*(address(where)[0] for where in asked))
        plain = ", NOT ENCRYPTED (--tls-cert, or a private network)" if bare else ""
        if self.server:
            return f"prefills for others, who ask at {options.peer_address}{plain}"
        return f"decodes; asks {', '.join(options.peers)} for the pages of prompts{plain}"

    def counters(self) -> MetricTotals:
        """Totals for ``/metrics``: pages sent and received, and hand-overs that did not come to their end."""
        sent, received = self.server.sent if self.server else 0, self.peers.received if self.peers else 0
        pages, side = {"sent": sent, "received": received}, self.server or self.peers
        failures = dict(side.failures) if side else {}
        return {
            ("mtp_jax:handover_pages", "Pages handed over.", "direction"): pages,
            ("mtp_jax:handover_failures", "Hand-overs cut short.", "reason"): failures,
        }

    def identity(self) -> str:
        """Facts that pages depend on besides tokens: model, all bytes and name of the weights, form of cache.

        Nobody else's while weights are being replaced.
        """
        form = [(a.shape, str(a.dtype)) for a in self._like]
        weights = self._weights.now() or secrets.token_hex()
        facts = *facts_of_pages(self._engine, weights), form
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    # Decode

    async def fetch(self, peers: Peers, request: Request) -> None:
        """Fetch the missing pages of a prompt into the host tier, if peers send them in time.

        The time limit runs from the call on, whether or not a thread is free.
        """
        deadline = time.monotonic() + self._options.peer_seconds
        engine, ids, salt = self._engine, request.prompt, request.salt
        if len(salt.encode()) > _LONGEST_SALT or not engine.scheduler.looks_up(request):
            return
        lacked = await self._allm.on_engine(partial(missing, engine, request))
        if lacked.first < len(lacked.digests):
            identity, like = self.identity(), self._like
            wanted = Wanted(ids, salt, lacked.digests, lacked.first, like, identity, deadline)
            get = partial(peers.fetch, wanted)
            pages = await asyncio.get_running_loop().run_in_executor(self._threads, get)
            await self._allm.on_engine(partial(take_in, engine, lacked, pages))

    # Prefill

    def _pages(self, asked: Prefill, deadline: float) -> Iterator[tuple[bytes, Page]]:
        """Yield each page of a prompt, its digest first, on a connection's thread. Raises WireError."""
        digests = self._wait(deadline, self._prefill(asked, deadline))
        for i in range(asked.first, len(digests), _PAGES):
            part = digests[i : i + _PAGES]
            pages = self._wait(deadline, self._allm.on_engine(partial(copy_out, self._engine, part)))()
            yield from zip(part, pages, strict=False)
            if len(pages) < len(part):
                return

    async def _prefill(self, asked: Prefill, deadline: float) -> Sequence[bytes]:
        ids = asked.ids.tolist()
        request = self._engine.make_request(ids, _ONE_TOKEN, cache_salt=asked.salt)
        lacked = await self._allm.on_engine(partial(missing, self._engine, request))
        if lacked.first < len(lacked.digests):
            seconds = max(deadline - time.monotonic(), 1e-3)
            outputs = self._allm.generate(ids, _ONE_TOKEN, cache_salt=asked.salt, timeout=seconds)
            async for _ in outputs:
                pass
        return lacked.digests

    def _wait(self, deadline: float, coroutine: Coroutine[None, None, _T]) -> _T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop has ended
            coroutine.close()
            raise WireError("refused", str(error)) from error
        try:
            return future.result(max(deadline - time.monotonic(), 0))
        except TimeoutError as error:
            future.cancel()
            raise WireError("late") from error
        except MtpJaxError as error:
            raise WireError("refused", str(error)) from error


def _listen(where: str) -> socket.socket:
    host, port = address(where)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot bind to peer_address = {where!r}: {error}; choose another") from error
    return listener
