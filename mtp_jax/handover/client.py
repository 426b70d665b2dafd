"""The side that decodes: it asks others for the pages of a prompt. A fault means fewer pages, no error."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.handover.wire import Connection, PeerError, field, greet
from mtp_jax.store.page import Page, checksum, size

_LOG = logging.getLogger(__name__)
_REST = 9  # times what it has cost: at most a tenth of the time is spent on peers that do not answer

Address = tuple[str, int]


@dataclass(frozen=True)
class Wanted:
    """The pages that are asked for.

    Attributes:
        ids: of a prompt.
        salt: of its digests.
        digests: of all its full pages.
        first: the number of the first one that is missing.
        like: a page, for its shapes and types.
        identity: what pages depend on besides tokens.
        deadline: ``time.monotonic()`` after which nobody waits for them.
    """

    ids: Sequence[int]
    salt: str
    digests: Sequence[bytes]
    first: int
    like: Page
    identity: str
    deadline: float


class Peers:
    """Servers that prefill. Any thread may ask.

    Attributes:
        received: pages.
        failures: hand-overs that did not come to their end, by reason.
    """

    def __init__(self, addresses: Sequence[Address], secret: bytes) -> None:
        self.received, self.failures = 0, Counter[str]()
        self._addresses, self._secret, self._rests = addresses, secret, Rests()

    def fetch(self, wanted: Wanted) -> list[tuple[Page, int]]:
        """Pages from number ``wanted.first`` on and their checksums, as many as came whole in time.

        Prompts that begin with the same page go to the same server, whose prefix cache has it then, or to the
        next one while that does not answer.
        """
        pages: list[tuple[Page, int]] = []
        began = time.monotonic()
        start = int.from_bytes(wanted.digests[0][:8], "big") % len(self._addresses)
        order, address = [*self._addresses[start:], *self._addresses[:start]], None
        try:
            if wanted.deadline <= began:  # in the queue of threads: no peer has been asked
                raise PeerError("late")
            address = self._rests.choose(order, began, wanted.deadline)
            if address is None:
                raise PeerError("skipped", "no peer has answered lately")
            self._receive(address, wanted, pages)
            self._rests.answered(address, time.monotonic())
        except PeerError as error:
            self.failures[error.reason] += 1
            lacking = len(wanted.digests) - wanted.first
            log = _LOG.debug if error.reason == "skipped" else _LOG.warning
            log("%d of %d pages were handed over: %s", len(pages), lacking, error)
            if address is not None:
                now = time.monotonic()
                if error.reason in ("late", "unreachable"):
                    self._rests.silent(address, began, now)
                else:
                    self._rests.answered(address, now)
        self.received += len(pages)
        return pages

    def _receive(self, address: Address, wanted: Wanted, pages: list[tuple[Page, int]]) -> None:
        """Add the pages that come. Raises PeerError."""
        try:
            left = max(wanted.deadline - time.monotonic(), 1e-3)
            connected = socket.create_connection(address, timeout=left)
        except TimeoutError as error:
            raise PeerError("late", f"{address[0]}:{address[1]} does not answer") from error
        except OSError as error:
            raise PeerError("unreachable", f"{address[0]}:{address[1]}: {error}") from error
        with connected:
            connection = greet(connected, self._secret, wanted.identity, wanted.deadline)
            about = {"salt": wanted.salt, "first": wanted.first}
            seconds = max(wanted.deadline - time.monotonic(), 1e-3)
            connection.send("prefill", about | {"seconds": seconds}, [np.asarray(wanted.ids, "<i4").data])
            for digest in wanted.digests[wanted.first :]:
                page = _page(connection, digest, wanted)
                if page is None:
                    return
                pages.append((page, checksum(page)))
            connection.receive("end")  # so that the server does not take a closed connection for a lost one


def _page(connection: Connection, digest: bytes, wanted: Wanted) -> Page | None:
    """The next page; None at the end. Raises PeerError."""
    kind, header, body = connection.receive("page", "end", most=size(wanted.like))
    if kind == "end":
        return None
    if field(header, "identity", str) != wanted.identity:
        raise PeerError("config", "the weights of the other side were replaced meanwhile")
    if field(header, "digest", str) != digest.hex() or len(body) != size(wanted.like):
        raise PeerError("protocol", "a page that was not asked for")
    arrays, at = [], 0
    for array in wanted.like:
        arrays.append(np.frombuffer(body, array.dtype, array.size, at).reshape(array.shape))
        at += array.nbytes
    return tuple(arrays)


class Rests:
    """Which peers are left alone, and until when. Times are seconds of one clock. Any thread may ask.

    A peer that was silent rests for nine times what it has cost. Then one hand-over tries it, and the others
    go on without until its outcome is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Address, float] = {}
        self._answered: dict[Address, float] = {}

    def choose(self, peers: Sequence[Address], now: float, deadline: float) -> Address | None:
        """The first of these peers that does not rest. deadline: of the hand-over that asks."""
        with self._lock:
            for peer in peers:
                until = self._until.get(peer)
                if until is None or until <= now:
                    if until is not None:
                        self._until[peer] = deadline
                    return peer
        return None

    def answered(self, peer: Address, now: float) -> None:
        """It lives, whatever it says."""
        with self._lock:
            self._until.pop(peer, None)
            self._answered[peer] = now

    def silent(self, peer: Address, began: float, now: float) -> None:
        """It was waited for in vain since ``began``. If it has answered others meanwhile, it is only slow."""
        with self._lock:
            if self._answered.get(peer, began) <= began:
                self._until[peer] = now + _REST * (now - began)
