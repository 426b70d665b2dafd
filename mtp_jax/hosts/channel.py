"""One connection of the launch log: numbered messages both ways, and a sign of life every few seconds.

uint32 bytes of body | uint8 packed | uint64 number | body | tag of all that stands before it
"""

import contextlib
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

from mtp_jax.decode.launches import Launch
from mtp_jax.handshake import TAG, Seals
from mtp_jax.hosts.codec import decode, encode
from mtp_jax.hosts.messages import Alive, LogError, Message

_HEAD = struct.Struct("<IBQ")
# One that is paused for longer, or whose host is gone without a word, is lost. JAX's own service would end
# the process without a readable line after its 10 s.
ALIVE_SECONDS = 2.0
SILENT_SECONDS = 3 * ALIVE_SECONDS
_MOST_BYTES = 2**32 - 1  # what the head has room for
# Smaller messages fit in a few packets. Of larger ones most are rows of the vocabulary and masks, which are
# mostly one value: 1.3 MB become 12 kB, in about a millisecond.
_PACKED_FROM = 4096


class Channel:
    """A connection whose other end has proved itself. ``got`` and ``lost`` are called on a thread of its own.

    got: a message. lost: why nothing more will come; once, and not after ``close``.
    """

    def __init__(
        self,
        sock: socket.socket,
        seals: Seals,
        got: Callable[[Message | Launch[Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._seals, self._got, self._lost = sock, seals, got, lost
        self._sending, self._sent, self._received = threading.Lock(), 0, 0
        self._closed = threading.Event()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._reader = threading.Thread(target=self._read, name="log-read", daemon=True)

    def start(self) -> None:
        """Read, and show that this end lives."""
        self._reader.start()
        threading.Thread(target=self._live, name="log-live", daemon=True).start()

    def send(self, message: Message | Launch[Any]) -> None:
        """Send a message. Raises OSError, LogError."""
        self.send_body(*prepared(message))

    def send_body(self, packed: bool, body: bytes) -> None:
        """Send what ``prepared`` made. Raises OSError."""
        with self._sending:
            head = _HEAD.pack(len(body), packed, self._sent)
            self._sock.sendall(b"".join((head, body, self._seals.sent.next(head, body))))
            self._sent += 1

    def finish(self) -> None:
        """Send no more, and wait until the other end has read all of it and closed, or does not."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        if self._reader.ident is not None:
            self._reader.join(SILENT_SECONDS)
        self._sock.close()

    def close(self) -> None:
        """End the connection now: what has not arrived may be lost."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _live(self) -> None:
        while not self._closed.wait(ALIVE_SECONDS):
            try:
                self.send(Alive())
            except OSError:
                return  # whoever reads sees it, too

    def _read(self) -> None:
        try:
            while True:
                message = self._next()
                if not isinstance(message, Alive):
                    self._got(message)
        except Exception as error:  # whatever it is, nothing more is read
            if not self._closed.is_set():
                known = isinstance(error, OSError | LogError)
                self._lost(str(error) if known else f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def _next(self) -> Message | Launch[Any]:
        size, packed, number = _HEAD.unpack(head := self._exactly(_HEAD.size))
        if number != self._received:
            raise LogError(f"message {number} came where {self._received} was due")
        self._received += 1
        body = self._exactly(size)
        if not self._seals.received.check(self._exactly(TAG), head, body):
            raise LogError("a message that the other end did not send in this form")
        if packed:
            unpacking = zlib.decompressobj()
            try:
                body = unpacking.decompress(body, _MOST_BYTES)
            except zlib.error as error:
                raise LogError(f"a packed message is damaged: {error}") from error
            if not unpacking.eof:
                raise LogError("a packed message is cut off, or too long")
        message = decode(body)
        if not isinstance(message, Message | Launch):
            raise LogError(f"a {type(message).__name__} is no message")
        return message

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view = memoryview(found)
        while view:
            if not self._readable.poll(SILENT_SECONDS * 1000):
                raise LogError(f"nothing came for {SILENT_SECONDS:g} s")
            got = self._sock.recv_into(view)
            if not got:
                raise LogError("the connection ended")
            view = view[got:]
        return found


def prepared(message: Message | Launch[Any]) -> tuple[bool, bytes]:
    """A message that may be sent on several channels: whether it is packed, and its body. Raises LogError."""
    body = encode(message)
    if len(body) > _MOST_BYTES:
        raise LogError(f"a message of {len(body):,} bytes; the most is {_MOST_BYTES:,}: use fewer pages")
    packed = len(body) >= _PACKED_FROM and not (isinstance(message, Launch) and message.dense)
    return packed, zlib.compress(body, 1) if packed else body
