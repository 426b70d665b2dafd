"""The launch log by itself: what is written is read, and whoever does not belong is refused."""

import os
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey, Topology
from mtp_jax.decode.launches import Move, WritePages
from mtp_jax.errors import ConfigError
from mtp_jax.hosts import channel as channels
from mtp_jax.hosts import leader_log
from mtp_jax.hosts.channel import Channel
from mtp_jax.hosts.codec import decode, encode
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.hello import difference, folder_digest, versions
from mtp_jax.hosts.leader_log import LeaderLog
from mtp_jax.hosts.messages import Alive, End, LogError, Masks, Publish
from mtp_jax.hosts.options import Hosts
from tests.hosts.ranks import two_free_ports

SECRET = b"a secret of the tests"
KEYS = [
    StepKey(4, 3, 2, SamplingMode("sampled", "block", 5, structured=True), None, 16, 2, 0),
    StepKey(1, 2, 1, SamplingMode(), Topology.chain(2)),
    DraftKey(2, 3),
    PageKey(8),
]
MASKS = Masks(np.zeros((1, 1, 4), np.uint32))
MOVED = encode(Move(1, 0))


# Bodies


@pytest.mark.parametrize("key", KEYS)
def test_keys_come_back(key):
    assert decode(encode(Publish(3, key))) == Publish(3, key)


def test_arrays_come_back():
    arrays = (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.zeros((0, 4), np.uint32),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([[0.5]], ml_dtypes.float8_e4m3fn),
    )
    for array in arrays:
        found = decode(encode(WritePages(1, tuple(range(len(array))), (array, array))))
        assert (found.shard, found.pages) == (1, tuple(range(len(array))))
        for got in found.data:
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 4) + b"\x80abc",
        encode(MASKS)[:-1],
        encode(MASKS) + b"x",
        *(
            struct.pack("<I", len(head)) + head
            for head in (
                b'{"object": [1]}',
                b'{"int32": [-1]}',
                b'{"int32": [4611686018427387904, 4]}',
                b'{"int32": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]}',
                b'{"int32": [true]}',
                b'{"Move": [1]}',
                b'{"Move": [1, 0, 2]}',
                b'{"Move": ["1", 0]}',
                b'{"Move": [1, 0], "End": []}',
                b'{"Publish": [1, {"PageKey": ["x"]}]}',
                b'{"WritePages": [0, [1, 2], [{"int32": [1, 0]}]]}',
                b'{"Masks": [{"uint32": [0]}]}',
                b'{"Ending": [1]}',
                b"[" * 100_000,
            )
        ),
    ],
)
def test_damaged_bodies_are_refused(body):
    with pytest.raises(LogError):
        decode(body)


def test_objects_are_not_sent():
    with pytest.raises(LogError, match="object"):
        encode(Masks(np.array([object()])))


# Channels

FRAME = struct.Struct("<IBQ")


class Ends:
    """A connection: a plain socket at the far end, a channel at the near one."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        self.got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.near = Channel(near, self.got.put, self.lost.put)
        self.near.start()

    def write(self, number: int, body: bytes = MOVED, packed: int = 0) -> None:
        self.far.sendall(FRAME.pack(len(body), packed, number) + body)


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.near.close()
    found.far.close()


def test_messages_arrive_in_order_packed_or_not(ends):
    masks = np.full((1, 4, 4000), 2**32 - 1, np.uint32)
    other = Ends()
    ends.near.send(Move(1, 0))
    ends.near.send(Masks(masks))
    sent = bytearray()
    while len(sent) < 2 * FRAME.size + 60:
        sent += ends.far.recv(1 << 20)
    assert len(sent) < 2000  # rows that allow everything take next to nothing
    other.far.sendall(sent)
    first, second = (other.got.get(timeout=5) for _ in range(2))
    assert first == Move(1, 0)
    np.testing.assert_array_equal(second.allowed, masks)
    other.near.close()
    other.far.close()


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda e: e.write(1), "message 1 came where 0 was due"),
        (lambda e: [e.write(0), e.write(0)], "message 0 came where 1 was due"),
        (lambda e: e.write(0, encode(PageKey(1))), "a PageKey is no message"),
        (lambda e: e.write(0, b"{}"), "cannot be read"),
        (lambda e: e.write(0, b"not packed", packed=1), "damaged"),
        (lambda e: e.write(0, zlib.compress(b"x" * 99)[:-6], packed=1), "cut off"),
        (lambda e: e.far.close(), "ended"),
    ],
)
def test_what_must_not_come_ends_a_channel(ends, write, reason):
    write(ends)
    assert reason in ends.lost.get(timeout=5)


def test_silence_ends_a_channel_and_signs_of_life_do_not(monkeypatch):
    monkeypatch.setattr(channels, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(channels, "SILENT_SECONDS", 0.5)
    ends = Ends()
    for number in range(8):
        ends.write(number, encode(Alive()))
        time.sleep(0.1)
    assert ends.lost.empty()
    assert ends.got.empty()
    assert "nothing came for 0.5 s" in ends.lost.get(timeout=5)
    ends.far.setblocking(False)
    assert len(ends.far.recv(1 << 16)) > 5 * FRAME.size  # and it has shown that it lives
    ends.near.close()
    ends.far.close()


# Joining


class Meeting:
    """A leader and what it is told, on a port of its own."""

    def __init__(self, hosts: int = 2, seconds: float = 20) -> None:
        self.hosts = Hosts(hosts, 0, f"127.0.0.1:{two_free_ports()}", join_seconds=seconds)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.leader = LeaderLog(self.hosts, SECRET, self.lost.put)
        self.failed: Exception | None = None

        def join() -> None:
            try:
                self.leader.join()
            except ConfigError as error:
                self.failed = error

        self.thread = threading.Thread(target=join)
        self.thread.start()

    def follower(self, rank: int = 1, secret: bytes = SECRET) -> FollowerLog:
        return FollowerLog(replace(self.hosts, rank=rank), secret, self.lost.put)

    def joined(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert self.failed is None


@pytest.fixture
def meeting() -> Iterator[Callable[..., Meeting]]:
    made: list[Meeting] = []

    def make(*args: Any, **options: Any) -> Meeting:
        made.append(Meeting(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.leader.close("the test is over")
        each.thread.join(10)


def test_followers_join_in_any_order_and_hear_the_same(meeting):
    group = meeting(hosts=3)
    second, first = group.follower(2), group.follower(1)
    group.joined()
    group.leader.send(Move(2, 1))
    ending = threading.Thread(target=group.leader.finish)
    ending.start()
    for follower in (first, second):
        assert follower.expect(Move) == Move(2, 1)
        assert follower.receive() == End()
        follower.finish()
    ending.join(10)
    assert not ending.is_alive()
    assert group.lost.empty()  # an end that was said is no loss


def test_garbage_on_the_port_disturbs_nobody(meeting, caplog):
    group = meeting()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100_000, b"", b"\x16\x03\x01" + os.urandom(500)):
        with socket.create_connection(group.hosts.address) as stranger, suppress(OSError):
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    silent = socket.create_connection(group.hosts.address)  # says nothing at all
    follower = group.follower()
    group.joined()
    assert caplog.text.count("dropped a connection from 127.0.0.1") == 3
    assert group.lost.empty()
    silent.close()
    follower.finish()


def test_another_secret_ends_the_start_on_both_sides_soon(meeting, caplog, monkeypatch):
    monkeypatch.setattr(leader_log, "_SECRET_SECONDS", 0.3)
    group = meeting(hosts=3, seconds=60)
    second = group.follower(2)
    with pytest.raises(ConfigError, match=r"rank 0 does not take rank 1 at .*another secret"):
        group.follower(secret=b"the secret of another group")
    group.thread.join(10)
    assert "wrong secret from 127.0.0.1" in caplog.text
    assert "rank 1 of 3 has another secret (127.0.0.1" in str(group.failed)
    second.finish()


def test_a_stranger_with_another_secret_is_forgiven_when_the_rank_comes(meeting, caplog):
    group = meeting(seconds=20)
    with pytest.raises(ConfigError, match="another secret"):
        group.follower(secret=b"the secret of another group")
    with socket.create_connection(group.hosts.address) as stranger:  # as a rank that there is not
        stranger.sendall(leader_log.PURPOSE + bytes(32) + leader_log.RANK.pack(7) + bytes(32))
        assert stranger.recv(100, socket.MSG_WAITALL)[-1:] == b"\2"
    follower = group.follower()
    group.joined()
    assert caplog.text.count("wrong secret from 127.0.0.1") == 1
    follower.finish()


def test_a_rank_comes_once(meeting):
    group = meeting(hosts=3)
    first = group.follower(1)
    with pytest.raises(ConfigError, match=r"does not take rank 1 .*a rank of its own"):
        group.follower(1)
    second = group.follower(2)
    group.joined()
    for each in (first, second):
        each.finish()


def test_a_leader_that_does_not_know_the_secret_is_refused():
    """It sends what a leader sends, and then a proof that it cannot make."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(leader_log.PURPOSE + bytes(32))
                sock.recv(1 << 10)
                sock.sendall(b"\1" + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        hosts = Hosts(2, 1, "127.0.0.1:1", log_port=port, join_seconds=10)
        with pytest.raises(ConfigError, match="the other side does not know the secret"):
            FollowerLog(hosts, SECRET, print)
        thread.join(10)


def test_nobody_there():
    hosts = Hosts(2, 1, f"127.0.0.1:{two_free_ports()}", join_seconds=0.2)
    with pytest.raises(ConfigError, match="rank 0 does not listen at 127"):
        FollowerLog(hosts, SECRET, print)


def test_a_port_that_is_taken_is_refused(meeting):
    group = meeting(seconds=0.1)
    with pytest.raises(ConfigError, match="the launch log cannot have 127"):
        LeaderLog(group.hosts, SECRET, print)


def test_a_difference_ends_the_start_on_both_sides(meeting):
    group = meeting()
    follower = group.follower()
    group.joined()
    refused: list[str] = []

    def compare() -> None:
        with pytest.raises(ConfigError) as caught:
            follower.compare({"jax": "0.10.2", "options": '{"page_size": 64, "dtype": "float32"}'})
        refused.append(str(caught.value))

    thread = threading.Thread(target=compare)
    thread.start()
    with pytest.raises(ConfigError) as caught:
        group.leader.compare({"jax": "0.10.2", "options": '{"page_size": 16, "dtype": "float32"}'})
    thread.join(10)
    words = "rank 1 differs from rank 0 in options: page_size = 64 there, page_size = 16 on rank 0"
    assert str(caught.value).startswith(words)
    assert refused == [str(caught.value)]


def test_a_lost_follower_and_a_lost_leader_are_named(meeting):
    group = meeting()
    follower = group.follower()
    group.joined()
    follower.finish()
    assert group.lost.get(timeout=5).startswith("rank 1 is lost")
    group = meeting()
    follower = group.follower()
    group.joined()
    group.leader.close("out of memory")
    assert group.lost.get(timeout=5) == "rank 0 failed: out of memory"
    follower.finish()


# What is compared, and the options


def test_what_is_compared(tmp_path):
    assert difference(versions(), versions(), 1) is None
    assert "in jax: None there" in str(difference(versions(), {}, 3)) or "Python" in str(
        difference(versions(), {}, 3)
    )
    (tmp_path / "config.json").write_text("{}")
    before = folder_digest(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("of this host alone")
    assert folder_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("[]")
    assert folder_digest(tmp_path) != before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": 2}, "coordinator = None; expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here"}, "expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here:0"}, "expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here:65535"}, "give another log_port"),
        ({"hosts": 2, "coordinator": "here:9", "log_port": 9}, "give another log_port"),
        ({"hosts": 2, "rank": 2, "coordinator": "here:9"}, "ranks go from 0 to 1"),
        ({"rank": 1}, "ranks go from 0 to 0"),
    ],
)
def test_options_that_cannot_be(given, words):
    with pytest.raises(ConfigError, match=words):
        Hosts(**given)


def test_the_log_has_the_port_after_the_coordinators():
    assert Hosts(2, 0, "[::1]:9").address == ("::1", 10)
