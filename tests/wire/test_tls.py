"""Encryption between processes of one secret: which sides come together, and the line that says why not.

``tests/tls/`` has a certificate that is its own authority, and in ``other.pem`` another with its key.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.door import end
from mtp_jax.wire.handshake import greet, welcome
from mtp_jax.wire.session import TlsSession
from mtp_jax.wire.signed import Signed
from mtp_jax.wire.tls import TlsFiles

FILES = Path(__file__).parents[1] / "tls"
SECRET, PURPOSE, CLAIM = b"a secret of the tests", b"tests 1\n", b"a claim of its own"
OWN = {"tls_cert": FILES / "cert.pem", "tls_key": FILES / "key.pem"}
OTHER = {"tls_cert": FILES / "other.pem"}


def credentials(**files: Any) -> Credentials:
    return Credentials(SECRET, TlsFiles(**files).peering())


PLAIN, TLS = credentials(), credentials(**OWN)
_OPENED: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """All sockets of a test, at its end."""
    yield
    while _OPENED:
        end(sock := _OPENED.pop())
        sock.close()


def pair() -> tuple[socket.socket, socket.socket]:
    _OPENED.extend(found := socket.socketpair())
    return found


class Relay:
    """Passes bytes between two sockets on, and keeps them. ``change``: to the n-th piece of the listener."""

    def __init__(self, change: Callable[[int, bytes], bytes] = lambda n, data: data) -> None:
        self.near, ours = pair()
        self.far, theirs = pair()
        self.seen = bytearray()
        for source, target, harm in ((ours, theirs, change), (theirs, ours, lambda n, data: data)):
            threading.Thread(target=self._pass, args=(source, target, harm), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, harm: Any) -> None:
        n = 0
        try:
            while data := source.recv(2**16):
                self.seen += data
                target.sendall(harm(n, data))
                n += 1
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def meet(listener: Credentials, caller: Credentials, relay: Relay | None = None) -> list[Any]:
    """The connection and the seals of the listener and of the caller, or the error of each."""
    near, far = (relay.near, relay.far) if relay else pair()
    until, found = time.monotonic() + 20, list[Any]([None, None])

    def side(i: int, sock: socket.socket) -> None:
        connection = Connection(sock, until)
        try:
            if i == 0:
                found[i] = connection, welcome(connection, listener, PURPOSE, len(CLAIM))[1]
            else:
                found[i] = connection, greet(connection, caller, PURPOSE, CLAIM)
        except WireError as refused:
            found[i] = refused
            connection.close()

    thread = threading.Thread(target=side, args=(0, near))
    thread.start()
    side(1, far)
    thread.join(30)
    return found


def told(found: list[Any]) -> list[str]:
    assert all(isinstance(error, WireError) and error.reason == "tls" for error in found), found
    assert all("\n" not in str(error) for error in found)
    return [str(error) for error in found]


def test_messages_cross_encrypted_both_ways_at_once():
    """One thread reads while another writes, messages larger than a record and than a piece."""
    relay, text, count = Relay(), "words that nobody else may read ", 3
    sides = [Signed(c, seals, {}, 1 << 22) for c, seals in meet(TLS, TLS, relay)]
    big, got = text * 10_000, list[object]()
    writers = [threading.Thread(target=lambda s=s: [s.send(big) for _ in range(count)]) for s in sides]
    readers = [
        threading.Thread(target=lambda s=s: got.extend(s.receive() for _ in range(count))) for s in sides
    ]
    for thread in (*writers, *readers):
        thread.start()
    for thread in (*writers, *readers):
        thread.join(30)
    assert got == [big] * (2 * count)
    assert len(relay.seen) > 2 * count * len(big)
    assert text.encode() not in relay.seen
    plain = Relay()
    first, _ = (Signed(c, seals, {}, 1 << 22) for c, seals in meet(PLAIN, PLAIN, plain))
    first.send(text)
    while text.encode() not in plain.seen:  # a relay that saw nothing would prove nothing
        time.sleep(0.01)


@pytest.mark.parametrize(("listener", "caller"), [(TLS, PLAIN), (PLAIN, TLS)], ids=["caller", "listener"])
def test_one_side_without_tls_is_told_to_both(listener: Credentials, caller: Credentials):
    for i, line in enumerate(told(meet(listener, caller))):
        this_one = (listener, caller)[i].tls is not None
        assert line.startswith("this side encrypts" if this_one else "the other side encrypts")
        assert line.endswith("does not: give --tls-cert to both, or to neither")


def test_authorities_ask_both_sides_for_a_certificate_of_theirs():
    member = credentials(**OWN, tls_ca=OWN["tls_cert"])
    stranger = credentials(**OTHER)
    assert isinstance(meet(member, member)[0], tuple)
    refused, ended = told(meet(member, stranger))
    assert refused.startswith("its certificate is not taken: self-signed certificate; see --tls-ca")
    assert ended.startswith("it has ended TLS: tlsv1 alert unknown ca; see --tls-cert")
    ended, refused = told(meet(stranger, member))
    assert refused.startswith("its certificate is not taken: self-signed certificate")
    assert "alert unknown ca" in ended


def test_the_secret_is_proved_for_the_listeners_own_certificate():
    """Somebody between the two who ends TLS on both sides, and passes on everything that was encrypted."""
    between = credentials(**OTHER).tls
    assert between
    (near, ours), (theirs, far) = pair(), pair()
    until = time.monotonic() + 20

    def attack() -> None:
        to_listener, to_caller = Connection(ours, until), Connection(theirs, until)
        for side in (to_listener, to_caller):
            side.write(PURPOSE + b"\1")
            side.read(len(PURPOSE) + 1)
        to_listener.start_tls(TlsSession(between, listens=False))
        to_caller.start_tls(TlsSession(between, listens=True))
        to_caller.write(to_listener.read(32))
        to_listener.write(to_caller.read(32 + len(CLAIM) + 32))
        to_caller.write(to_listener.read(1))

    def call() -> None:
        with pytest.raises(WireError, match="another secret"):
            greet(Connection(far, until), TLS, PURPOSE, CLAIM)

    threads = [threading.Thread(target=run) for run in (attack, call)]
    for thread in threads:
        thread.start()
    with pytest.raises(WireError, match="does not know the secret") as caught:
        welcome(Connection(near, until), TLS, PURPOSE, len(CLAIM))
    assert caught.value.claim == CLAIM  # everything else was passed on as it is
    for thread in threads:
        thread.join(30)


def test_the_claim_is_encrypted():
    for own, hidden in ((TLS, True), (PLAIN, False)):
        relay = Relay()
        assert isinstance(meet(own, own, relay)[1], tuple)
        assert (CLAIM in relay.seen) is not hidden


def test_a_changed_byte_is_damage():
    relay = Relay(lambda n, data: data if n < 3 else data[:-1] + bytes([data[-1] ^ 1]))
    found = meet(TLS, TLS, relay)
    assert any(isinstance(error, WireError) and error.reason == "damaged" for error in found), found


def test_an_end_without_a_word_is_a_loss():
    (near, _), (far, _) = meet(TLS, TLS)
    near.write(b"x" * 100)
    near.finish()
    assert far.read(100) == b"x" * 100
    with pytest.raises(WireError, match="the connection ended"):
        far.read(1)


def test_contexts_of_peers_speak_the_newest_version_alone():
    assert TLS.tls
    for context in (TLS.tls.listening, TLS.tls.calling):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert PLAIN.tls is None
    with pytest.raises(ConfigError, match="--tls-cert nowhere: No such file"):
        credentials(tls_cert="nowhere")


def test_only_traffic_that_leaves_this_computer_is_called_plain():
    assert not TlsFiles().is_plain("localhost", "127.0.0.1", "::1")
    assert TlsFiles().is_plain("localhost", "10.0.0.1")
    assert not TlsFiles(**OWN).is_plain("10.0.0.1")
