"""Messages of the launch log: what is written is read, and nothing else is."""

import queue
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey, Topology
from mtp_jax.decode.launches import Move, WritePages
from mtp_jax.handshake import TAG, Seals, Tags
from mtp_jax.hosts import channel as channels
from mtp_jax.hosts.channel import Channel
from mtp_jax.hosts.codec import decode, encode
from mtp_jax.hosts.messages import Alive, LogError, Masks, Publish

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


def nested(begin: bytes, end: bytes, times: int = 20_000) -> bytes:
    head = begin * times + end * times
    return struct.pack("<I", len(head)) + head


FRAME = struct.Struct("<IBQ")
KEY = b"of one direction"


class Ends:
    """A connection: a plain socket at the far end, a channel at the near one."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        self.got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.near = Channel(near, Seals(Tags(KEY), Tags(KEY)), self.got.put, self.lost.put)
        self.near.start()
        self.tags = Tags(KEY)

    def write(self, number: int, body: bytes = MOVED, packed: int = 0, tags: Tags | None = None) -> None:
        head = FRAME.pack(len(body), packed, number)
        self.far.sendall(head + body + (tags or self.tags).next(head, body))


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
    while len(sent) < 2 * (FRAME.size + TAG) + 60:
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
        (lambda e: e.write(0, tags=Tags(b"of another")), "did not send in this form"),
        (lambda e: e.write(0, nested(b"[", b"]")), "cannot be read"),
        (lambda e: e.write(0, nested(b'{"Move": [', b"]}")), "cannot be read"),
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


@pytest.mark.parametrize("error", [RecursionError("too deep"), MemoryError(), KeyError("x")])
def test_whatever_goes_wrong_while_reading_is_a_loss(ends, monkeypatch, error):
    """Not the silent end of a thread, at which the group would wait for ever."""

    def fails(body: object) -> None:
        raise error

    monkeypatch.setattr(channels, "decode", fails)
    ends.write(0)
    assert ends.lost.get(timeout=5).startswith(type(error).__name__)
