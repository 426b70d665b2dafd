"""Messages of the launch log: what is written is read, and nothing else is."""

import queue
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey
from mtp_jax.decode.launches import Move, WritePages
from mtp_jax.hosts import channel as channels
from mtp_jax.hosts.channel import Channel, prepared
from mtp_jax.hosts.messages import KINDS, Alive, Masks, Publish
from mtp_jax.wire import signed
from mtp_jax.wire.codec import decode, encode
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.signed import HEAD, TAG, MessageTags, Seals, framed

KEYS = [
    StepKey(4, 3, 2, SamplingMode("sampled", "block", 5, structured=True), 16, 2, 0),
    StepKey(1, 2, 1, SamplingMode()),
    DraftKey(2, 3),
    PageKey(8),
]
MASKS = Masks(np.zeros((1, 1, 4), np.uint32))
MOVED = prepared(Move(1, 0))


# Values


def read(value: Any, cut: int | None = None, more: bytes = b"") -> Any:
    """The value as the other side reads it, without the end of its arrays, or with more behind them."""
    text, arrays = encode(value)
    return decode(text, b"".join(arrays)[:cut] + more, KINDS)


@pytest.mark.parametrize("key", KEYS)
def test_keys_come_back(key):
    assert read(Publish(3, key)) == Publish(3, key)


def test_arrays_come_back():
    arrays = (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.zeros((0, 4), np.uint32),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([[0.5]], ml_dtypes.float8_e4m3fn),
    )
    for array in arrays:
        found = read(WritePages(1, tuple(range(len(array))), (array, array)))
        assert (found.shard, found.pages) == (1, tuple(range(len(array))))
        for got in found.data:
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"\x80abc",
        b'{"object": [1]}',
        b'{"int32": [-1]}',
        b'{"int32": [1]}',
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
    ],
)
def test_damaged_values_are_refused(text):
    with pytest.raises(WireError, match="cannot be read"):
        decode(text, b"", KINDS)


def test_arrays_are_as_long_as_is_said():
    for cut, more in ((-1, b""), (None, b"x")):
        with pytest.raises(WireError, match="cannot be read"):
            read(MASKS, cut, more)
    assert not read(MASKS).allowed.flags.writeable


def test_objects_are_not_sent():
    with pytest.raises(WireError, match="object"):
        encode(Masks(np.array([object()])))


# Channels


def nested(begin: bytes, end: bytes, times: int = 20_000) -> bytes:
    text = begin * times + end * times
    return HEAD.pack(len(text), 0, 0) + text


def packed(arrays: bytes) -> bytes:
    return HEAD.pack(2, len(arrays), 1) + b"{}" + arrays


KEY = b"of one direction"


class Ends:
    """A connection: a plain socket at the far end, a channel at the near one."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        self.got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        seals = Seals(MessageTags(KEY), MessageTags(KEY))
        self.near = Channel(Connection(near), seals, self.got.put, self.lost.put)
        self.near.start()
        self.tags = MessageTags(KEY)

    def write(self, message: bytes = MOVED, tag: bytes | None = None) -> None:
        self.far.sendall(message + (tag or self.tags.next([message])))


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
    while len(sent) < 2 * (HEAD.size + TAG) + 60:
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
        (lambda e: [e.tags.next([]), e.write()], "did not send in this form"),  # one is left out
        (
            lambda e: [e.write(), e.write(tag=MessageTags(KEY).next([MOVED]))],
            "did not send in this form",
        ),  # repeated
        (lambda e: e.write(tag=MessageTags(b"of another").next([MOVED])), "did not send in this form"),
        (lambda e: e.write(framed(PageKey(1), 1000)), "a PageKey is no message"),
        (lambda e: e.write(HEAD.pack(2, 0, 0) + b"{}"), "cannot be read"),
        (lambda e: e.write(HEAD.pack((1 << 20) + 1, 0, 0)), "the most is 1,048,576"),
        (lambda e: e.write(packed(b"not packed")), "damaged"),
        (lambda e: e.write(packed(zlib.compress(b"x" * 99)[:-6])), "cut off"),
        (lambda e: e.write(nested(b"[", b"]")), "cannot be read"),
        (lambda e: e.write(nested(b'{"Move": [', b"]}")), "cannot be read"),
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
    for _ in range(8):
        ends.write(prepared(Alive()))
        time.sleep(0.1)
    assert ends.lost.empty()
    assert ends.got.empty()
    assert "nothing came for 0.5 s" in ends.lost.get(timeout=5)
    ends.far.setblocking(False)
    assert len(ends.far.recv(1 << 16)) > 5 * HEAD.size  # and it has shown that it lives
    ends.near.close()
    ends.far.close()


@pytest.mark.parametrize("error", [RecursionError("too deep"), MemoryError(), KeyError("x")])
def test_whatever_goes_wrong_while_reading_is_a_loss(ends, monkeypatch, error):
    """Not the silent end of a thread, at which the group would wait for ever."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(signed, "decode", fails)
    ends.write()
    assert ends.lost.get(timeout=5).startswith(type(error).__name__)
