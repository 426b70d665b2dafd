"""The side that prefills: it listens, and sends the pages of prompts that peers ask for."""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from mtp_jax.cluster.handover.pages_protocol import (
    KINDS,
    MOST_JSON,
    PURPOSE,
    Done,
    GaveUp,
    Prefill,
    SentPage,
    claim,
    expect,
)
from mtp_jax.store.page import Page
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.door import Door, end
from mtp_jax.wire.handshake import welcome
from mtp_jax.wire.signed import Signed

_LOG = logging.getLogger(__name__)
_MOST_MEMBERS = 64
_GREETING_SECONDS = 5.0
_LONGEST_SECONDS = 600.0


class PageServer:
    """A thread per connection, of which each serves one prompt.

    Attributes:
        sent: number of pages sent. failures: number of hand-overs that failed, by reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        own: Credentials,
        most_tokens: int,
        identity: Callable[[], str],
        pages: Callable[[Prefill, float], Iterator[tuple[bytes, Page]]],
    ) -> None:
        """listener: a bound socket. identity: returns the facts that pages depend on.

        pages: returns a prompt's pages, until a ``time.monotonic()``; called on a connection's thread.
        """
        self.sent, self.failures = 0, Counter[str]()
        self._own, self._most_bytes = own, 4 * most_tokens
        self._identity, self._pages = identity, pages
        self._members: set[socket.socket] = set()
        self._door = Door(listener, self._serve, "peer")

    def start(self) -> None:
        """Begin to listen."""
        self._door.open()

    def stop(self) -> None:
        """Close every connection."""
        self._door.close()
        for member in [*self._members]:
            end(member)

    def _serve(self, connected: socket.socket, peer: str) -> None:
        try:
            with connected:
                self._answer(connected, peer)
        except Exception:
            self.failures["error"] += 1
            _LOG.exception("a hand-over failed")
        finally:
            self._members.discard(connected)

    def _answer(self, connected: socket.socket, peer: str) -> None:
        connection = Connection(connected, time.monotonic() + _GREETING_SECONDS)
        identity = self._identity()
        mine = claim(identity)

        def take(theirs: bytes) -> None:
            if theirs != mine:
                raise WireError("config", "the other model, weights or cache differ")

        try:
            _, seals = welcome(connection, self._own, PURPOSE, len(mine), take)
        except WireError as error:  # a caller without a proof gets no answer
            self.failures[error.reason] += 1
            _LOG.info("a connection from %s was refused: %s", peer, error)
            return
        signed = Signed(connection, seals, KINDS, MOST_JSON)
        try:
            if not self._door.proved(connected):
                raise WireError("lost", "others came before it had proved itself")
            self._members.add(connected)
            if len(self._members) > _MOST_MEMBERS:
                raise WireError("refused", f"{_MOST_MEMBERS} hand-overs are under way")
            asked = expect(signed, Prefill, most=self._most_bytes)
            if asked.first < 0 or not 0 < asked.seconds <= _LONGEST_SECONDS:
                raise WireError("protocol", "first or seconds out of range")
            connection.deadline = time.monotonic() + asked.seconds
            for digest, page in self._pages(asked, connection.deadline):
                if self._identity() != identity:
                    raise WireError("config", "the weights were replaced meanwhile")
                signed.send(SentPage(digest.hex(), identity, page))
                self.sent += 1
            signed.send(Done())
        except WireError as error:
            self.failures[error.reason] += 1
            _LOG.info("a hand-over ended early: %s", error)
            with suppress(WireError):
                signed.send(GaveUp(error.reason))
