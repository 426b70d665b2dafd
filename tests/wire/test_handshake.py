"""The secret, and the proofs of two sides that they know it."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.handshake import greet, welcome
from mtp_jax.wire.secret import VARIABLE, read_secret
from mtp_jax.wire.signed import TAG, Seals

SECRET, PURPOSE, CLAIM = b"a secret of the tests", b"tests 1\n", b"four"
PLAIN = b"\0"


def meet(caller: Callable[[socket.socket, float], Any], **changes: Any) -> list[Any]:
    """What the listener and the caller give, or how each was refused."""
    near, far = socket.socketpair()
    end = time.monotonic() + changes.pop("seconds", 5)
    found: list[Any] = [None, None]
    seals: list[Any] = [None, None]

    def listen() -> None:
        try:
            found[0], seals[0] = welcome(
                Connection(near, end), Credentials(SECRET), PURPOSE, len(CLAIM), **changes
            )
        except WireError as refused:
            found[0] = refused.reason, refused.claim
        near.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        seals[1] = caller(far, end)
    except WireError as refused:
        found[1] = refused.reason
    thread.join(10)
    far.close()
    if all(seals):
        agree(*seals)
        agree(*reversed(seals))
        assert seals[0].sent.next([b"a"]) != seals[1].sent.next([b"a"])  # nothing can be sent back
    return found


def agree(one: Seals, other: Seals) -> None:
    """What one side sends is taken by the other, in order, once, and unchanged."""
    first, second, third = (one.sent.next([b"head", memoryview(b"body")]) for _ in range(3))
    assert len({first, second, third}) == 3
    assert len(first) == TAG
    assert other.received.check(first, [b"head", bytearray(b"body")])
    assert not other.received.check(first, [b"head", b"body"])
    assert other.received.check(third, [b"headbody"])
    assert not other.received.check(one.sent.next([b"head", b"body"]), [b"head", b"bodY"])


def calls(secret: bytes = SECRET, purpose: bytes = PURPOSE) -> Callable[[socket.socket, float], Any]:
    return lambda sock, end: greet(Connection(sock, end), Credentials(secret), purpose, CLAIM)


def says(data: bytes) -> Callable[[socket.socket, float], None]:
    return lambda sock, end: sock.sendall(data)


def test_both_sides_know_the_secret():
    assert meet(calls()) == [CLAIM, None]


def test_another_secret_is_told_to_both_sides():
    assert meet(calls(b"another secret")) == [("secret", CLAIM), "secret"]


def test_a_claim_that_does_not_fit_is_told_to_both_sides():
    def take(claim: bytes) -> None:
        raise WireError("config", "not this one", claim)

    assert meet(calls(), take=take) == [("config", CLAIM), "config"]


def test_another_protocol_is_seen_by_its_first_byte():
    assert meet(calls(purpose=b"tests 2\n"))[1] == "protocol"
    assert meet(says(b"G")) == [("protocol", None), None]


def test_who_speaks_the_protocol_without_the_secret():
    assert meet(says(PURPOSE + PLAIN + bytes(32) + CLAIM + bytes(32)))[0] == ("secret", CLAIM)


def test_who_says_nothing():
    assert meet(says(PURPOSE), seconds=0.2)[0] == ("late", None)


def test_a_proof_is_of_one_meeting():
    """What another caller has said proves nothing when it is said again."""
    near, far = socket.socketpair()
    near.sendall(PURPOSE + PLAIN + bytes(32))
    with near, far, pytest.raises(WireError, match="nothing came for"):
        greet(Connection(far, time.monotonic() + 0.2), Credentials(SECRET), PURPOSE, CLAIM)
    near, far = socket.socketpair()
    near.sendall(PURPOSE + PLAIN + bytes(32) + b"\2")
    with near, far:
        with pytest.raises(WireError, match="another secret"):
            greet(Connection(far, time.monotonic() + 5), Credentials(SECRET), PURPOSE, CLAIM)
        said = near.recv(1 << 10)
    assert meet(says(said))[0] == ("secret", CLAIM)


def test_the_secret(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="hosts = 2 needs a secret"):
        read_secret(None, "hosts = 2")
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ConfigError, match="the secret has 5 bytes"):
        read_secret(None, "hosts = 2")
    monkeypatch.setenv(VARIABLE, SECRET.decode())
    assert read_secret(None, "hosts = 2") == SECRET
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(file, "hosts = 2")
    with pytest.raises(ConfigError, match="~nobody-of-this-name/x cannot be read"):
        read_secret("~nobody-of-this-name/x", "hosts = 2")
    file.write_bytes(b"another secret, in a file\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(file, "hosts = 2")
    file.chmod(0o600)
    assert read_secret(file, "hosts = 2") == b"another secret, in a file"
