"""The secret that all ranks share, and how each proves to the other that it knows it without showing it.

    leader -> follower   "mtp-jax log 1\n", nonce a
    follower -> leader   nonce b, rank, HMAC(secret, "follower", a, b, rank)
    leader -> follower   HMAC(secret, "leader", a, b, rank); or the connection ends

Both read a fixed number of bytes before they know who is there. What follows is neither encrypted nor signed:
the network must be the group's own.
"""

import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.hosts.options import Hosts

VARIABLE = "MTP_JAX_SECRET"
_HELLO = b"mtp-jax log 1\n"
_NONCE = 32
_PROOF = 32
_RANK = struct.Struct("<I")
_SHORTEST = 16  # bytes: 128 bits, if they are random


class Refused(Exception):
    """The other side is not of this group, or says nothing in time."""


def read_secret(hosts: Hosts) -> bytes:
    """From the file, or else from the environment. Raises ConfigError."""
    how = f"give all ranks the same, such as `openssl rand -hex 32`: --secret-file, or {VARIABLE}"
    if hosts.secret_file is None:
        found = os.environ.get(VARIABLE, "").strip().encode()
        if not found:
            raise ConfigError(f"hosts = {hosts.hosts} need a secret; {how}")
    else:
        path = Path(hosts.secret_file).expanduser()
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


def challenge(sock: socket.socket, secret: bytes, take: Callable[[int], None], seconds: float) -> int:
    """The leader's side: the rank of the follower that has proved itself. Raises Refused.

    take: called with the rank before the leader proves itself; raises Refused if nobody may have it.
    """
    end = time.monotonic() + seconds
    mine = secrets.token_bytes(_NONCE)
    _send(sock, _HELLO + mine, end)
    answer = receive(sock, _NONCE + _RANK.size + _PROOF, end)
    theirs, packed, proof = answer[:_NONCE], answer[_NONCE:-_PROOF], answer[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, b"follower", mine, theirs, packed)):
        raise Refused("it does not know the secret")
    (rank,) = _RANK.unpack(packed)
    take(rank)
    _send(sock, _proof(secret, b"leader", mine, theirs, packed), end)
    return rank


def answer(sock: socket.socket, secret: bytes, rank: int, seconds: float) -> None:
    """The follower's side. Raises Refused."""
    end = time.monotonic() + seconds
    hello = receive(sock, len(_HELLO) + _NONCE, end)
    if not hello.startswith(_HELLO):
        raise Refused("what listens there is no launch log of this version")
    theirs, mine, packed = hello[len(_HELLO) :], secrets.token_bytes(_NONCE), _RANK.pack(rank)
    _send(sock, mine + packed + _proof(secret, b"follower", theirs, mine, packed), end)
    try:
        proof = receive(sock, _PROOF, end)
    except Refused as error:
        raise Refused(f"rank 0 does not take this rank: another secret, or rank {rank} twice") from error
    if not hmac.compare_digest(proof, _proof(secret, b"leader", theirs, mine, packed)):
        raise Refused("rank 0 does not know the secret")


def receive(sock: socket.socket, count: int, end: float) -> bytes:
    """So many bytes before ``time.monotonic()`` is ``end``. Raises Refused."""
    found = b""
    while len(found) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise Refused("it says nothing")
        sock.settimeout(left)
        try:
            part = sock.recv(count - len(found))
        except OSError as error:
            raise Refused(f"it went away: {error}") from error
        if not part:
            raise Refused("it went away")
        found += part
    return found


def _send(sock: socket.socket, data: bytes, end: float) -> None:
    sock.settimeout(max(end - time.monotonic(), 0.001))
    try:
        sock.sendall(data)
    except OSError as error:
        raise Refused(f"it went away: {error}") from error


def _proof(secret: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join([who, *parts]), "sha256")
