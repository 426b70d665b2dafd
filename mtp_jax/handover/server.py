"""The side that prefills: it listens, and sends the pages of prompts that others ask for."""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mtp_jax.door import Door, end
from mtp_jax.handover.wire import Connection, PeerError, field, welcome
from mtp_jax.store.page import Page

_LOG = logging.getLogger(__name__)
_MOST_MEMBERS = 64
_GREETING_SECONDS = 5.0
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Asked:
    """A prompt whose pages are asked for.

    Attributes:
        ids: of its tokens.
        salt: of its digests.
        first: how many pages the other side has.
        deadline: ``time.monotonic()`` after which nobody waits for them.
    """

    ids: list[int]
    salt: str
    first: int
    deadline: float


class PageServer:
    """A thread per connection, of which each serves one prompt.

    Attributes:
        sent: pages.
        failures: hand-overs that did not come to their end, by reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        most_tokens: int,
        identity: Callable[[], str],
        pages: Callable[[Asked], Iterator[tuple[bytes, Page]]],
    ) -> None:
        """listener: bound. identity: what the pages depend on now. pages: called on a connection's thread."""
        self.sent, self.failures = 0, Counter[str]()
        self._secret, self._most_bytes = secret, 4 * most_tokens
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
        try:
            identity = self._identity()
            connection = welcome(connected, self._secret, identity, time.monotonic() + _GREETING_SECONDS)
        except PeerError as error:  # who has not proved itself is told nothing
            self.failures[error.reason] += 1
            _LOG.info("a connection from %s was refused: %s", peer, error)
            return
        try:
            if not self._door.proved(connected):
                raise PeerError("lost", "others came before it had proved itself")
            self._members.add(connected)
            if len(self._members) > _MOST_MEMBERS:
                raise PeerError("refused", f"{_MOST_MEMBERS} hand-overs are under way")
            asked = self._read(connection)
            connection.deadline = asked.deadline
            for digest, page in self._pages(asked):
                if self._identity() != identity:
                    raise PeerError("config", "the weights were replaced meanwhile")
                about = {"digest": digest.hex(), "identity": identity}
                parts = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in page]
                connection.send("page", about, parts)
                self.sent += 1
            connection.send("end", {})
        except PeerError as error:
            self.failures[error.reason] += 1
            _LOG.info("a hand-over ended early: %s", error)
            with suppress(PeerError):
                connection.send("error", {"reason": error.reason})

    def _read(self, connection: Connection) -> Asked:
        _, header, body = connection.receive("prefill", most=self._most_bytes)
        first, seconds = field(header, "first", int), field(header, "seconds", float)
        if first < 0 or not 0 < seconds <= _LONGEST_SECONDS or len(body) % 4:
            raise PeerError("protocol", "first, seconds or ids out of range")
        ids = np.frombuffer(body, "<i4").tolist()
        return Asked(ids, field(header, "salt", str), first, time.monotonic() + seconds)
