"""The side that decodes: it asks peers for the pages of a prompt. A fault means fewer pages, no error."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.cluster.handover.pages_protocol import (
    KINDS,
    MOST_JSON,
    PURPOSE,
    Done,
    Prefill,
    SentPage,
    claim,
    expect,
)
from mtp_jax.store.page import Page, checksum, size
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.handshake import greet
from mtp_jax.wire.signed import Signed

_LOG = logging.getLogger(__name__)
_REST = 9  # times the wait that a silent peer has cost: at most a tenth of the time goes to silent peers

Address = tuple[str, int]


@dataclass(frozen=True)
class Wanted:
    """The pages that a server asks its peers for.

    Attributes:
        ids: tokens of a prompt.
        salt: salt of its digests.
        digests: digests of all its full pages.
        first: the number of the first missing page.
        like: a page, for its shapes and types.
        identity: facts that pages depend on besides tokens.
        deadline: ``time.monotonic()`` until which the client waits for them.
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
        received: number of pages received.
        failures: number of hand-overs that failed, by reason.
    """

    def __init__(self, addresses: Sequence[Address], own: Credentials) -> None:
        self.received, self.failures = 0, Counter[str]()
        self._addresses, self._own, self._rests = addresses, own, Rests()

    def fetch(self, wanted: Wanted) -> list[tuple[Page, int]]:
        """Pages from number ``wanted.first`` on and their checksums, up to the first that did not come whole
        in time.

        Prompts that begin with the same page go to the same server, whose prefix cache has it then, or to the
        next one while that does not answer.
        """
        pages: list[tuple[Page, int]] = []
        began = time.monotonic()
        start = int.from_bytes(wanted.digests[0][:8], "big") % len(self._addresses)
        order, address = [*self._addresses[start:], *self._addresses[:start]], None
        try:
            if wanted.deadline <= began:  # the wait in the queue of threads took all the time
                raise WireError("late")
            address = self._rests.choose(order, began, wanted.deadline)
            if address is None:
                raise WireError("skipped", "no peer has answered lately")
            self._receive(address, wanted, pages)
            self._rests.answered(address, time.monotonic())
        except WireError as error:
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
        """Append the pages that the peer sends. Raises WireError."""
        try:
            left = max(wanted.deadline - time.monotonic(), 1e-3)
            connected = socket.create_connection(address, timeout=left)
        except TimeoutError as error:
            raise WireError("late", f"{address[0]}:{address[1]} does not answer") from error
        except OSError as error:
            raise WireError("unreachable", f"{address[0]}:{address[1]}: {error}") from error
        with connected:
            connection = Connection(connected, wanted.deadline)
            seals = greet(connection, self._own, PURPOSE, claim(wanted.identity))
            signed = Signed(connection, seals, KINDS, MOST_JSON)
            seconds = max(wanted.deadline - time.monotonic(), 1e-3)
            signed.send(Prefill(wanted.salt, wanted.first, seconds, np.asarray(wanted.ids, np.int32)))
            for digest in wanted.digests[wanted.first :]:
                sent = expect(signed, SentPage, Done, most=size(wanted.like))
                if isinstance(sent, Done):
                    return
                page = _page(sent, digest, wanted)
                pages.append((page, checksum(page)))
            expect(signed, Done)  # so that the server does not take a closed connection for a lost one


def _page(sent: SentPage, digest: bytes, wanted: Wanted) -> Page:
    """The message, if it is the page of this digest. Raises WireError."""
    if sent.identity != wanted.identity:
        raise WireError("config", "the weights of the other side were replaced meanwhile")
    if sent.digest != digest.hex() or _forms(sent.page) != _forms(wanted.like):
        raise WireError("protocol", "a page that was not asked for")
    return sent.page


def _forms(page: tuple) -> list[object]:
    return [(a.shape, a.dtype) if isinstance(a, np.ndarray) else None for a in page]


class Rests:
    """Peers that are not asked for a time. Times are seconds of one clock. Any thread may ask.

    A peer that was silent rests for nine times the wait that it has cost. Then one hand-over tries the peer,
    and other hand-overs go without it until the outcome is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Address, float] = {}
        self._answered: dict[Address, float] = {}

    def choose(self, peers: Sequence[Address], now: float, deadline: float) -> Address | None:
        """The first of these peers that does not rest. deadline: the hand-over's."""
        with self._lock:
            for peer in peers:
                until = self._until.get(peer)
                if until is None or until <= now:
                    if until is not None:
                        self._until[peer] = deadline
                    return peer
        return None

    def answered(self, peer: Address, now: float) -> None:
        """Record that a peer has answered."""
        with self._lock:
            self._until.pop(peer, None)
            self._answered[peer] = now

    def silent(self, peer: Address, began: float, now: float) -> None:
        """Record a vain wait for a peer since ``began``; a peer that has answered meanwhile is only slow."""
        with self._lock:
            if self._answered.get(peer, began) <= began:
                self._until[peer] = now + _REST * (now - began)
