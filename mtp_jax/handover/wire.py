"""Messages between two servers that hand over pages, over TCP: a header in JSON, then bytes. No pickle.

    both:   the proofs of ``handshake``; the client's claim is a digest of its identity
    client: prefill {salt, first, seconds}, token ids
    server: page {digest, identity}, bytes, once per page; then end {}

Identity is what pages depend on besides tokens. A message is two lengths, a header, bytes, and a tag of all
of it. Nothing is encrypted.
"""

import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from mtp_jax import handshake

PURPOSE = b"mtp-jax pages 3\n"
MOST_HEADER = 2**16
_LENGTHS = struct.Struct("!II")
_MOST_READ = 2**20


class PeerError(Exception):
    """A hand-over that did not come to its end.

    Attributes:
        reason: "unreachable", "lost", "late", "secret", "config", "refused", "protocol", "damaged" or
            "skipped".
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Connection:
    """A socket whose other side has proved itself. Every operation ends at the deadline at the latest.

    Raises PeerError.

    Attributes:
        deadline: ``time.monotonic()`` then.
    """

    def __init__(self, connected: socket.socket, seals: handshake.Seals, deadline: float) -> None:
        self.deadline, self._socket, self._seals = deadline, connected, seals
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, header: dict[str, Any], parts: Sequence[Any] = ()) -> None:
        """Send a message; parts: its bytes, in order."""
        text = json.dumps({"kind": kind, **header}).encode()
        if len(text) > MOST_HEADER:
            raise PeerError("protocol", f"a header of {len(text)} bytes; at most {MOST_HEADER}")
        views = [memoryview(part).cast("B") for part in parts]
        pieces = (_LENGTHS.pack(len(text), sum(map(len, views))), text, *views)
        try:
            for piece in (*pieces, self._seals.sent.next(*pieces)):
                self._wait()
                self._socket.sendall(piece)
        except TimeoutError as error:
            raise PeerError("late") from error
        except OSError as error:
            raise PeerError("lost", str(error)) from error

    def receive(self, *kinds: str, most: int = 0) -> tuple[str, dict[str, Any], bytearray]:
        """A message of one of these kinds, with ``most`` bytes at most behind its header."""
        length, size = _LENGTHS.unpack(lengths := self._read(_LENGTHS.size))
        if length > MOST_HEADER or size > most:
            raise PeerError("protocol", f"a message of {length} and {size} bytes; at most {most}")
        text, body = self._read(length), self._read(size)
        if not self._seals.received.check(self._read(handshake.TAG), lengths, text, body):
            raise PeerError("damaged", "a message that the other side did not send in this form")
        try:
            header = json.loads(text)
            kind = header["kind"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PeerError("protocol", "a header that is no object with a kind") from error
        if kind == "error" and isinstance(header.get("reason"), str):
            raise PeerError(header["reason"][:20])
        if kind not in kinds:
            raise PeerError("protocol", f"{kind!r:.40} where {' or '.join(kinds)} was expected")
        return kind, header, body

    def _read(self, size: int) -> bytearray:
        found = bytearray(size)
        view, at = memoryview(found), 0
        try:
            while at < size:
                self._wait()
                count = self._socket.recv_into(view[at : at + _MOST_READ])
                if not count:
                    raise PeerError("lost", "the connection ended in the midst of a message")
                at += count
        except TimeoutError as error:
            raise PeerError("late") from error
        except OSError as error:
            raise PeerError("lost", str(error)) from error
        return found

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise PeerError("late")
        self._socket.settimeout(left)


def field(header: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a header. Raises PeerError if it is missing or of another type."""
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PeerError("protocol", f"{name} = {value!r:.40}; expected {kind.__name__}")
    return value


def greet(connected: socket.socket, secret: bytes, identity: str, deadline: float) -> Connection:
    """The client's side of the proofs. identity: what the pages of this side depend on."""
    with _peer_errors():
        seals = handshake.greet(connected, secret, PURPOSE, _claim(identity), deadline)
    return Connection(connected, seals, deadline)


def welcome(connected: socket.socket, secret: bytes, identity: str, deadline: float) -> Connection:
    """The server's side of the proofs. Whoever does not know the secret is told nothing else."""
    mine = _claim(identity)

    def take(claim: bytes) -> None:
        if claim != mine:
            raise handshake.Refused("config", "the other model, weights or cache differ", claim)

    with _peer_errors():
        _, seals = handshake.welcome(connected, secret, PURPOSE, len(mine), deadline, take)
    return Connection(connected, seals, deadline)


def _claim(identity: str) -> bytes:
    return sha256(identity.encode()).digest()


@contextmanager
def _peer_errors() -> Iterator[None]:
    try:
        yield
    except handshake.Refused as refused:
        raise PeerError(refused.reason, str(refused)) from refused
