"""One secret: how two processes prove to each other that they know it, and sign what they say from then on.

    listener -> caller   purpose, nonce a
    caller -> listener   purpose, nonce b, claim, HMAC(secret, "caller", purpose, a, b, claim)
    listener -> caller   TAKEN, HMAC(secret, "listener", purpose, a, b, claim); or why not, one byte

The purpose is a line that names the protocol and its version, the claim what the caller says of itself, of a
size that the protocol knows. So both sides read a fixed number of bytes before they know who is there. Of the
same values and the secret both derive a key for each direction, and sign every message that follows
(``Tags``): who stands between the two can end the connection, but not change, repeat or leave out a message.
Nothing is encrypted.
"""

import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from mtp_jax.errors import ConfigError

VARIABLE = "MTP_JAX_SECRET"
TAG = 32  # bytes
_NONCE = _PROOF = 32
_SHORTEST = 16  # bytes: 128 bits, if they are random
_TAKEN, _OTHER_SECRET, _NOT_TAKEN = b"\1", b"\2", b"\3"


class Refused(Exception):
    """The other side does not belong here, or says nothing in time.

    Attributes:
        reason: "secret", "config" (what it claims does not fit), "protocol", "late" or "lost".
        claim: of a caller that speaks the protocol, whether or not it knows the secret.
    """

    def __init__(self, reason: str, message: str, claim: bytes | None = None) -> None:
        super().__init__(message)
        self.reason, self.claim = reason, claim


Buffer = bytes | bytearray | memoryview


class Tags:
    """The tags of the messages of one direction: keyed BLAKE2b (RFC 7693) over their numbers and bytes."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next(self, *parts: Buffer) -> bytes:
        """The tag of the next message, given in parts whose lengths follow from the first."""
        tag = blake2b(self._count.to_bytes(8, "big"), key=self._key, digest_size=TAG)
        for part in parts:
            tag.update(part)
        self._count += 1
        return tag.digest()

    def check(self, tag: Buffer, *parts: Buffer) -> bool:
        """Whether this is the tag of the next message."""
        return hmac.compare_digest(bytes(tag), self.next(*parts))


class Seals(NamedTuple):
    """The tags of what this side sends, and of what it receives."""

    sent: Tags
    received: Tags


def read_secret(file: str | Path | None, what: str) -> bytes:
    """From the file, or else from the environment. what: needs it. Raises ConfigError."""
    how = f"give all sides the same, such as `openssl rand -hex 32`: --secret-file, or {VARIABLE}"
    if file is None:
        found = os.environ.get(VARIABLE, "").strip().encode()
        if not found:
            raise ConfigError(f"{what} needs a secret; {how}")
    else:
        path = Path(file).expanduser()
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            found = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"secret file {path} cannot be read: {error.strerror}; {how}") from error
        if mode & 0o007:
            raise ConfigError(f"secret file {path} has mode {mode:o}: others may read it; chmod 600 {path}")
    if len(found) < _SHORTEST:
        raise ConfigError(f"the secret has {len(found)} bytes; expected {_SHORTEST} or more; {how}")
    return found


def welcome(
    sock: socket.socket,
    secret: bytes,
    purpose: bytes,
    size: int,
    end: float,
    take: Callable[[bytes], None] = lambda claim: None,
) -> tuple[bytes, Seals]:
    """The listener's side: the claim, of ``size`` bytes, of a caller that knows the secret. Raises Refused.

    end: ``time.monotonic()`` at the latest. take: is called with the claim before this side proves itself;
    raises Refused if it does not fit.
    """
    mine = secrets.token_bytes(_NONCE)
    _send(sock, purpose + mine, end)
    _expect(sock, purpose, end)
    answer = _receive(sock, _NONCE + size + _PROOF, end)
    theirs, claim, proof = answer[:_NONCE], answer[_NONCE:-_PROOF], answer[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, b"caller", purpose, mine, theirs, claim)):
        _send(sock, _OTHER_SECRET, end)
        raise Refused("secret", "it does not know the secret", claim)
    try:
        take(claim)
    except Refused:
        _send(sock, _NOT_TAKEN, end)
        raise
    about = purpose, mine, theirs, claim
    _send(sock, _TAKEN + _proof(secret, b"listener", *about), end)
    caller, listener = _directions(secret, *about)
    return claim, Seals(listener, caller)


def greet(sock: socket.socket, secret: bytes, purpose: bytes, claim: bytes, end: float) -> Seals:
    """The caller's side. Raises Refused. end: ``time.monotonic()`` at the latest."""
    _expect(sock, purpose, end)
    theirs, mine = _receive(sock, _NONCE, end), secrets.token_bytes(_NONCE)
    _send(sock, purpose + mine + claim + _proof(secret, b"caller", purpose, theirs, mine, claim), end)
    verdict = _receive(sock, len(_TAKEN), end)
    if verdict == _OTHER_SECRET:
        raise Refused("secret", "the other side has another secret")
    if verdict == _NOT_TAKEN:
        raise Refused("config", "the other side knows the secret, but does not take what this side is")
    proof = _receive(sock, _PROOF, end)
    about = purpose, theirs, mine, claim
    if not hmac.compare_digest(proof, _proof(secret, b"listener", *about)):
        raise Refused("secret", "the other side does not know the secret")
    return Seals(*_directions(secret, *about))


def _directions(secret: bytes, *about: bytes) -> tuple[Tags, Tags]:
    """The tags of what the caller, and of what the listener sends."""
    caller, listener = (_proof(secret, b"from " + who, *about) for who in (b"caller", b"listener"))
    return Tags(caller), Tags(listener)


def _expect(sock: socket.socket, purpose: bytes, end: float) -> None:
    """Read the purpose. Raises Refused at the first byte that is another."""
    found = b""
    while len(found) < len(purpose):
        found += _part(sock, len(purpose) - len(found), end)
        if not purpose.startswith(found):
            raise Refused("protocol", f"it does not speak {purpose.decode().strip()!r}")


def _receive(sock: socket.socket, count: int, end: float) -> bytes:
    found = b""
    while len(found) < count:
        found += _part(sock, count - len(found), end)
    return found


def _part(sock: socket.socket, most: int, end: float) -> bytes:
    left = end - time.monotonic()
    if left <= 0:
        raise Refused("late", "it says nothing")
    sock.settimeout(left)
    try:
        part = sock.recv(most)
    except TimeoutError as error:
        raise Refused("late", "it says nothing") from error
    except OSError as error:
        raise Refused("lost", f"it went away: {error}") from error
    if not part:
        raise Refused("lost", "it went away")
    return part


def _send(sock: socket.socket, data: bytes, end: float) -> None:
    sock.settimeout(max(end - time.monotonic(), 0.001))
    try:
        sock.sendall(data)
    except OSError as error:
        raise Refused("lost", f"it went away: {error}") from error


def _proof(secret: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join([who, *parts]), "sha256")
