"""Signed messages: a value in JSON, its arrays as they lie in memory, and a tag of both.

uint32 bytes of JSON | uint32 bytes of arrays | uint8 packed | JSON | arrays | tag of all in front of it
"""

import hmac
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from mtp_jax.wire.codec import decode, encode
from mtp_jax.wire.connection import Buffer, Connection, WireError

TAG = 32  # bytes
HEAD = struct.Struct("<IIB")
MOST_BYTES = 2**32 - 1  # of arrays: the head has room for no greater number
# Smaller arrays fit in a few packets. Larger arrays are mostly rows of the vocabulary and masks, which are
# mostly one value: 1.3 MB become 12 kB, in about a millisecond.
_PACKED_FROM = 4096


class MessageTags:
    """The tags of the messages of one direction: keyed BLAKE2b (RFC 7693) over their numbers and bytes."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next(self, parts: Sequence[Buffer]) -> bytes:
        """The tag of the next message, whose parts have lengths that the first part tells."""
        tag = blake2b(self._count.to_bytes(8, "big"), key=self._key, digest_size=TAG)
        for part in parts:
            tag.update(part)
        self._count += 1
        return tag.digest()

    def check(self, tag: Buffer, parts: Sequence[Buffer]) -> bool:
        """Whether this is the tag of the next message."""
        return hmac.compare_digest(bytes(tag), self.next(parts))


class Seals(NamedTuple):
    """The tags of this side's messages, and of the other side's."""

    sent: MessageTags
    received: MessageTags


class Signed:
    """Messages over a connection whose other side has proved itself. Any thread may send; one receives.

    Attributes:
        connection: carries the messages.
    """

    def __init__(
        self, connection: Connection, seals: Seals, kinds: Mapping[str, type], most_json: int
    ) -> None:
        """kinds: classes of values that may come, by name. most_json: limit of a message's JSON, bytes."""
        self.connection, self._seals, self._kinds, self._most_json = connection, seals, kinds, most_json
        self._sending = threading.Lock()

    def send(self, value: object) -> None:
        """Send a value. Raises WireError."""
        self.send_framed(framed(value, self._most_json))

    def send_framed(self, message: bytes) -> None:
        """Send a message of ``framed``, which may go to several connections. Raises WireError."""
        with self._sending:
            self.connection.write(message + self._seals.sent.next([message]))

    def receive(self, most: int = 0) -> object:
        """The next value. most: limit of the bytes of its arrays. Raises WireError."""
        length, size, packed = HEAD.unpack(head := self.connection.read(HEAD.size))
        if length > self._most_json or size > most:
            said = f"a message of {length:,} and {size:,} bytes"
            raise WireError("protocol", f"{said}; the most is {self._most_json:,} and {most:,}")
        text, arrays = self.connection.read(length), self.connection.read(size)
        if not self._seals.received.check(self.connection.read(TAG), [head, text, arrays]):
            raise WireError("damaged", "a message that the other side did not send in this form")
        return decode(text, _unpacked(arrays, most) if packed else arrays, self._kinds)


def framed(value: object, most_json: int, *, pack: bool = False) -> bytes:
    """A message without its tag. Raises WireError if it is too large, or cannot be sent.

    pack: compress its arrays if they are large.
    """
    text, parts = encode(value)
    size = sum(map(len, parts))
    if len(text) > most_json or size > MOST_BYTES:
        said = f"a message of {len(text):,} and {size:,} bytes"
        raise WireError("protocol", f"{said}; the most is {most_json:,} and {MOST_BYTES:,}: use fewer pages")
    pack &= size >= _PACKED_FROM
    if pack:
        parts = [zlib.compress(b"".join(parts), 1)]
        size = len(parts[0])
    return b"".join([HEAD.pack(len(text), size, pack), text, *parts])


def _unpacked(arrays: Buffer, most: int) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(arrays, max(most, 1))
    except zlib.error as error:
        raise WireError("protocol", f"a packed message is damaged: {error}") from error
    if not unpacking.eof:
        raise WireError("protocol", "a packed message is cut off, or too long")
    return found
