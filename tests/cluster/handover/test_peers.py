"""Pages between two processes' ends of a socket: proofs, limits, and every fault with its reason."""

import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.cluster.handover import server as servers
from mtp_jax.cluster.handover.client import Peers, Rests, Wanted
from mtp_jax.cluster.handover.pages_protocol import (
    KINDS,
    MOST_JSON,
    PURPOSE,
    REASONS,
    Done,
    GaveUp,
    Prefill,
    SentPage,
    claim,
)
from mtp_jax.cluster.handover.server import PageServer
from mtp_jax.store.page import Page, checksum
from mtp_jax.wire import door
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.handshake import greet
from mtp_jax.wire.signed import HEAD, TAG, MessageTags, Seals, Signed, framed
from mtp_jax.wire.tls import TlsFiles
from tests.cluster.handover.proxy import Proxy, cut, flip, stall

SECRET = Credentials(b"sixteen characters")
FILES = Path(__file__).parents[2] / "tls"
DIGESTS = [bytes([i]) * 32 for i in range(5)]
PAGES: list[Page] = [(np.full((4, 8), i, np.float32), np.full(300, i, np.uint8)) for i in range(5)]


class Source:
    """A server of ``PAGES``."""

    def __init__(self, **changes) -> None:
        self.name, self.asked = "same", list[Prefill]()
        given = {"own": SECRET, "most_tokens": 100, "identity": lambda: self.name, "pages": self.pages}
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.server = PageServer(listener, **given | changes)
        self.server.start()

    def pages(self, asked: Prefill, deadline: float) -> Iterator[tuple[bytes, Page]]:
        self.asked.append(asked)
        yield from list(zip(DIGESTS, PAGES, strict=True))[asked.first :]


@contextmanager
def source(**changes) -> Iterator[Source]:
    found = Source(**changes)
    try:
        yield found
    finally:
        found.server.stop()


def wanted(seconds: float, first: int = 0, name: str = "same", digests: Sequence[bytes] = DIGESTS) -> Wanted:
    return Wanted([3, 1, 4], "salt", digests, first, PAGES[0], name, time.monotonic() + seconds)


def fetch(
    address: tuple[str, int],
    first: int = 0,
    own: Credentials = SECRET,
    seconds: float = 5.0,
    name: str = "same",
) -> tuple[int, dict[str, int]]:
    """How many pages came, all of them right, and what failed."""
    peers = Peers([address], own)
    found = peers.fetch(wanted(seconds, first, name))
    for (page, crc), want in zip(found, PAGES[first:], strict=False):
        assert crc == checksum(want)
        assert all(a.dtype == b.dtype and (a == b).all() for a, b in zip(page, want, strict=True))
    assert peers.received == len(found)
    return len(found), dict(peers.failures)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_pages_come_in_order():
    with source() as s:
        assert fetch(s.address) == (5, {})
        assert fetch(s.address, first=3) == (2, {})
        assert [(a.ids.tolist(), a.salt, a.first) for a in s.asked[:2]] == [
            ([3, 1, 4], "salt", n) for n in (0, 3)
        ]
        for _ in range(50):
            assert fetch(s.address) == (5, {})
        until(lambda: s.server.sent == 257)
        assert not s.server.failures


def test_pages_come_encrypted():
    files = TlsFiles(tls_cert=FILES / "cert.pem", tls_key=FILES / "key.pem", tls_ca=FILES / "cert.pem")
    own = Credentials(SECRET.secret, files.peering())
    with source(own=own) as s:
        assert fetch(s.address, own=own) == (5, {})
        assert fetch(s.address) == (0, {"tls": 1})
        until(lambda: s.server.failures == {"tls": 1})
    with source() as s:
        assert fetch(s.address, own=own) == (0, {"tls": 1})


def test_fewer_pages_than_were_asked_for():
    with source(pages=lambda *_: iter(list(zip(DIGESTS, PAGES, strict=True))[:2])) as s:
        assert fetch(s.address) == (2, {})


def length() -> int:
    """Bytes that the server sends."""
    with source() as s:
        proxy = Proxy(s.address)
        fetch(proxy.address)
        until(lambda: proxy.passed > 5 * 428)
        proxy.close()
        return proxy.passed


@pytest.mark.parametrize(
    ("harm", "reason", "seconds"),
    [(flip, "damaged", 5.0), (cut, "lost", 5.0), (stall, "late", 0.5)],
    ids=["damaged", "lost", "late"],
)
def test_what_came_before_a_fault_is_used(harm, reason, seconds):
    """In the last page's bytes, in front of the message that ends it all."""
    at = length() - 60
    with source() as s:
        proxy = Proxy(s.address, harm(at))
        count, failures = fetch(proxy.address, seconds=seconds)
        proxy.close()
    assert count <= 4
    assert count == 4 or reason != "damaged"
    assert failures == {reason: 1}


def test_nobody_is_there():
    with source() as s:
        address = s.address
    assert fetch(address) == (0, {"unreachable": 1})


def test_a_server_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert fetch(silent.getsockname(), seconds=0.3) == (0, {"late": 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"own": Credentials(b"another secret, of a stranger")}, "secret"), ({"name": "x"}, "config")],
)
def test_others_get_nothing(changes, reason):
    with source() as s:
        assert fetch(s.address, **changes) == (0, {reason: 1})
        assert not s.asked
        until(lambda: s.server.failures == {reason: 1})


def test_a_server_without_the_secret_is_not_believed():
    """It may send any proof, but none that fits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            with listener.accept()[0] as connected:
                connected.sendall(PURPOSE + bytes(33))
                connected.recv(1 << 10)
                connected.sendall(b"\1" + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        assert fetch(listener.getsockname()) == (0, {"secret": 1})
        thread.join()


def test_weights_that_are_replaced_in_the_midst():
    def pages(asked: Prefill, deadline: float) -> Iterator[tuple[bytes, Page]]:
        yield DIGESTS[0], PAGES[0]
        s.name = "new"
        yield DIGESTS[1], PAGES[1]

    with source(pages=pages) as s:
        assert fetch(s.address) == (1, {"config": 1})


@pytest.mark.parametrize(
    "page",
    [(DIGESTS[3], PAGES[0]), (DIGESTS[0], PAGES[0][:1]), (DIGESTS[0], (*PAGES[0], PAGES[0][1]))],
    ids=["digest", "short", "long"],
)
def test_a_page_that_was_not_asked_for(page):
    with source(pages=lambda *_: iter([page])) as s:
        assert fetch(s.address) == (0, {"protocol": 1})


def test_a_server_that_fails_ends_the_hand_over():
    def pages(asked: Prefill, deadline: float) -> Iterator[tuple[bytes, Page]]:
        yield DIGESTS[0], PAGES[0]
        raise KeyError("a fault of ours")

    with source(pages=pages) as s:
        assert fetch(s.address) == (1, {"lost": 1})
        until(lambda: s.server.failures == {"error": 1})
        assert fetch(s.address) == (1, {"lost": 1})


def test_prompts_that_are_too_long_are_refused():
    with source(most_tokens=2) as s:
        count, failures = fetch(s.address)
        until(lambda: s.server.failures == {"protocol": 1})
        # The connection is closed with ids that nobody has read, which may overtake the answer.
        assert count == 0
        assert failures in ({"protocol": 1}, {"lost": 1})


@pytest.mark.parametrize(
    "sent",
    [
        HEAD.pack(2**31, 0, 0),
        HEAD.pack(2, 2**31, 0) + b"{}",
        HEAD.pack(2, 400, 1) + b"{}" + zlib.compress(bytes(2**20))[:400].ljust(400, b"x"),
        *(
            HEAD.pack(len(text), 0, 0) + text
            for text in (
                *(b"[]", b'{"a"', b"[" * 60_000, b'{"Prefill": []}', b'{"Proof": []}'),
                b'{"Prefill": ["", 0, NaN, {"int32": [0]}]}',
                b'{"Prefill": ["", -1, 1.0, {"int32": [0]}]}',
                b'{"Prefill": ["", 0, 1.0, {"float32": [0]}]}',
                b'{"Prefill": ["", 0, 1.0, [3, 1, 4]]}',
            )
        ),
        framed(Done(), MOST_JSON),
    ],
    ids=[
        *("large JSON", "large arrays", "packed beyond its size", "no object", "no JSON", "nested"),
        *("no fields", "unknown kind", "no time", "out of range", "no ids", "no array", "another kind"),
    ],
)
@pytest.mark.parametrize("proved", [False, True])
def test_garbage_is_refused_and_the_next_one_is_served(sent, proved):
    with source() as s:
        with socket.create_connection(s.address) as stranger:
            if proved:
                connection = Connection(stranger, time.monotonic() + 5)
                seals = greet(connection, SECRET, PURPOSE, claim(s.name))
                sent += seals.sent.next([sent])
            stranger.sendall(sent)
            until(lambda: s.server.failures == {"protocol": 1})
        assert not s.asked
        assert fetch(s.address) == (5, {})


def test_messages_are_bounded_on_the_way_out_too():
    with source() as s, socket.create_connection(s.address) as connected:
        seals = Seals(MessageTags(b"a"), MessageTags(b"b"))
        signed = Signed(Connection(connected, time.monotonic() + 1), seals, KINDS, MOST_JSON)
        with pytest.raises(WireError, match=f"the most is {MOST_JSON:,}"):
            signed.send(GaveUp("x" * MOST_JSON))


@pytest.mark.parametrize("said", ["late", "refused", "error", "skipped", "unreachable", "", "x1", "é" * 9000])
def test_a_member_chooses_no_reason_of_its_own(said):
    """Reasons are keys of counters and labels of a metric, of which there must be few."""
    with source() as s, socket.create_connection(s.address) as connected:
        connection = Connection(connected, time.monotonic() + 5)
        seals = greet(connection, SECRET, PURPOSE, claim(s.name))
        Signed(connection, seals, KINDS, MOST_JSON).send(GaveUp(said))
        expected = said if said in ("late", "refused", "error") else "protocol"
        until(lambda: s.server.failures == {expected: 1})
    documented = (Path(__file__).parents[3] / "docs" / "disaggregation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", documented, re.MULTILINE)) - REASONS == {
        "unreachable",
        "skipped",
    }


def test_prompts_with_one_beginning_go_to_one_server():
    with source() as one, source() as other:
        peers = Peers([one.address, other.address], SECRET)
        for start in (0, 1, 0, 1, 0):
            peers.fetch(wanted(5.0, digests=[*DIGESTS[start:], *DIGESTS[:start]]))
        assert sorted([len(one.asked), len(other.asked)]) == [2, 3]


# Strangers


def connect(address: tuple[str, int], count: int) -> list[socket.socket]:
    return [socket.create_connection(address) for _ in range(count)]


def test_strangers_that_say_nothing_keep_nobody_out():
    """The oldest of them is ended for each that comes, be it one that will prove itself."""
    with source() as s:
        silent = connect(s.address, 200)
        for _ in range(3):
            assert fetch(s.address) == (5, {})
        for oldest in silent[: -door._MOST_STRANGERS]:  # ended, or else this waits in vain
            oldest.settimeout(10)
            with suppress(ConnectionResetError):
                while oldest.recv(100):
                    pass
        for sock in silent:
            sock.close()


def test_members_have_places_of_their_own(monkeypatch):
    """Strangers take none of them, and one member too many is told so."""
    monkeypatch.setattr(servers, "_MOST_MEMBERS", 1)
    go_on = threading.Event()

    def pages(asked: Prefill, deadline: float) -> Iterator[tuple[bytes, Page]]:
        go_on.wait(10)
        yield from zip(DIGESTS, PAGES, strict=True)

    with source(pages=pages) as s:
        silent = connect(s.address, 70)
        found: list[object] = []
        first = threading.Thread(target=lambda: found.append(fetch(s.address)))
        first.start()
        until(lambda: len(s.server._members) == 1)
        count, failures = fetch(s.address)
        assert count == 0
        assert failures in ({"refused": 1}, {"lost": 1})  # closed with a message that nobody has read
        go_on.set()
        first.join(10)
        assert found == [(5, {})]
        for sock in silent:
            sock.close()


# Who stands between the two


def test_who_passes_the_proofs_on_cannot_answer_in_the_servers_place():
    """Pages of zeros, well formed, in the place of those that the server sends."""
    forged: list[bytes] = []

    def instead(at: int, data: bytes) -> bytes:
        if at + len(data) <= greeting:
            return data
        zeros = tuple(np.zeros_like(array) for array in PAGES[0])
        forged.append(framed(SentPage(DIGESTS[0].hex(), "same", zeros), MOST_JSON) + bytes(TAG))
        return forged[-1] if len(forged) == 1 else b""

    greeting = len(PURPOSE) + 1 + 32 + 1 + 32
    with source() as s:
        proxy = Proxy(s.address, instead)
        assert fetch(proxy.address) == (0, {"damaged": 1})
        proxy.close()
    assert forged


# Peers that do not answer


def test_a_silent_peer_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as silent, source() as s:
        peers = Peers([silent.getsockname()], SECRET)
        assert peers.fetch(wanted(0.2)) == []
        began = time.monotonic()
        for _ in range(20):
            assert peers.fetch(wanted(60.0)) == []
        assert time.monotonic() - began < 60
        assert peers.failures == {"late": 1, "skipped": 20}
        # The next one of several is asked meanwhile.
        both = Peers([silent.getsockname(), s.address], SECRET)
        assert DIGESTS[0][7] % 2 == 0
        assert both.fetch(wanted(0.2)) == []
        assert len(both.fetch(wanted(60.0))) == 5
        assert both.failures == {"late": 1}


def test_a_hand_over_whose_time_has_passed_blames_no_peer():
    with source() as s:
        peers = Peers([s.address], SECRET)
        assert peers.fetch(wanted(-1.0)) == []
        assert len(peers.fetch(wanted(5.0))) == 5
        assert peers.failures == {"late": 1}


A, B = ("a", 1), ("b", 1)


def test_a_peer_rests_for_nine_times_what_it_cost():
    rests = Rests()
    assert rests.choose([A, B], 0, 10) == A
    rests.silent(A, 0, 10)
    assert rests.choose([A, B], 10, 20) == B
    assert rests.choose([A], 99.9, 109) is None
    assert rests.choose([A], 100, 110) == A  # one tries it
    assert rests.choose([A, B], 101, 111) == B  # the others go on without
    rests.silent(A, 100, 110)
    assert rests.choose([A], 110, 120) is None
    assert rests.choose([A], 200, 210) == A
    rests.answered(A, 201)
    assert rests.choose([A], 201, 211) == rests.choose([A], 201, 211) == A


def test_a_tenth_of_the_time_is_lost_at_most():
    """A stopped peer, 10 s for each hand-over, and 20 prompts that come every second, for an hour."""
    rests, waiting, lost = Rests(), list[tuple[int, int]](), 0
    for second in range(3600):
        for began, end in [w for w in waiting if w[1] == second]:
            rests.silent(A, began, end)
        waiting = [w for w in waiting if w[1] > second]
        for _ in range(20):
            if rests.choose([A], second, second + 10) == A:
                waiting.append((second, second + 10))
        lost += bool(waiting)
    assert lost <= 3600 / 10 + 20


def test_a_peer_that_answers_others_is_slow_not_silent():
    rests = Rests()
    assert rests.choose([A], 0, 10) == A
    rests.answered(A, 5)
    rests.silent(A, 0, 10)
    assert rests.choose([A], 10, 20) == A
