"""Messages between two servers that hand over pages, over TCP: a header in JSON, then bytes. No pickle.

    server: hello {version, nonce}
    client: proof {HMAC over both nonces, its own nonce, identity}
    server: proof {HMAC the other way round}, or an error
    client: prefill {salt, first, seconds}, token ids
    server: page {digest, crc, identity}, bytes, once per page; then end {}

Both sides must know the secret; it never travels. What follows the proofs is not encrypted.
"""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

VERSION = 1
MOST_HEADER = 2**16
_LENGTHS = struct.Struct("!II")
_MOST_READ = 2**20


class PeerError(Exception):
    """A hand-over that did not come to its end.

    Attributes:
        reason: "unreachable", "lost", "late", "secret", "config", "refused", "protocol" or "damaged".
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Connection:
    """A socket on which every operation ends at the deadline at the latest. Raises PeerError.

    Attributes:
        deadline: ``time.monotonic()`` then.
    """

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self.deadline, self._socket = deadline, connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, header: dict[str, Any], parts: Sequence[Any] = ()) -> None:
        """Send a message; parts: its bytes, in order."""
        text = json.dumps({"kind": kind, **header}).encode()
        if len(text) > MOST_HEADER:
            raise PeerError("protocol", f"a header of {len(text)} bytes; at most {MOST_HEADER}")
        views = [memoryview(part).cast("B") for part in parts]
        try:
            for piece in (_LENGTHS.pack(len(text), sum(map(len, views))), text, *views):
                self._wait()
                self._socket.sendall(piece)
        except TimeoutError as error:
            raise PeerError("late") from error
        except OSError as error:
            raise PeerError("lost", str(error)) from error

    def receive(self, *kinds: str, most: int = 0) -> tuple[str, dict[str, Any], bytearray]:
        """A message of one of these kinds, with ``most`` bytes at most behind its header."""
        length, size = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if length > MOST_HEADER or size > most:
            raise PeerError("protocol", f"a message of {length} and {size} bytes; at most {most}")
        try:
            header = json.loads(self._read(length))
            kind = header["kind"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PeerError("protocol", "a header that is no object with a kind") from error
        if kind == "error" and isinstance(header.get("reason"), str):
            raise PeerError(header["reason"][:20])
        if kind not in kinds:
            raise PeerError("protocol", f"{kind!r:.40} where {' or '.join(kinds)} was expected")
        return kind, header, self._read(size)

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


def _proof(secret: bytes, who: str, server: str, client: str, identity: str) -> str:
    return hmac.new(secret, json.dumps([who, VERSION, server, client, identity]).encode(), sha256).hexdigest()


def greet(connection: Connection, secret: bytes, identity: str) -> None:
    """The client's side of the proofs. identity: what the pages of this side depend on."""
    _, hello, _ = connection.receive("hello")
    if hello.get("version") != VERSION:
        raise PeerError("config", f"version {hello.get('version')!r:.40}; expected {VERSION}")
    server, client = field(hello, "nonce", str), secrets.token_hex(16)
    mine = _proof(secret, "client", server, client, identity)
    connection.send("proof", {"nonce": client, "proof": mine, "identity": identity})
    _, answer, _ = connection.receive("proof")
    expected = _proof(secret, "server", server, client, identity)
    if not hmac.compare_digest(field(answer, "proof", str).encode(), expected.encode()):
        raise PeerError("secret", "the server does not know the secret")


def welcome(connection: Connection, secret: bytes, identity: str) -> None:
    """The server's side of the proofs. Whoever does not know the secret is told nothing else."""
    server = secrets.token_hex(16)
    connection.send("hello", {"version": VERSION, "nonce": server})
    _, proof, _ = connection.receive("proof")
    client, theirs = field(proof, "nonce", str), field(proof, "identity", str)
    expected = _proof(secret, "client", server, client, theirs)
    if not hmac.compare_digest(field(proof, "proof", str).encode(), expected.encode()):
        raise PeerError("secret", "the client does not know the secret")
    if theirs != identity:
        raise PeerError("config", "the other model, weights or cache differ")
    connection.send("proof", {"proof": _proof(secret, "server", server, client, identity)})
