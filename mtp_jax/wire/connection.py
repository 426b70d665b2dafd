"""Bytes over a socket, each operation in time."""

import math
import select
import socket
import time
from contextlib import suppress

Buffer = bytes | bytearray | memoryview


class WireError(Exception):
    """The other side does not belong here, breaks the protocol, or says nothing in time.

    Attributes:
        reason: "lost", "late", "damaged", "protocol", "secret" or "config" (its options do not fit), or a
            word of a protocol's own.
        claim: the claim of a caller that speaks the protocol, whether or not it knows the secret.
    """

    def __init__(self, reason: str, message: str = "", claim: bytes | None = None) -> None:
        super().__init__(message or reason)
        self.reason, self.claim = reason, claim


class Connection:
    """A connected socket. One thread may read while another writes. Raises WireError "late" and "lost".

    Attributes:
        deadline: ``time.monotonic()`` at which every operation ends.
        silence: longest wait for the next byte, seconds.
    """

    def __init__(self, sock: socket.socket, deadline: float = math.inf) -> None:
        self.deadline, self.silence, self._sock = deadline, math.inf, sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        with suppress(OSError):  # not TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, count: int) -> bytearray:
        """Read the next ``count`` bytes."""
        found = bytearray(count)
        view = memoryview(found)
        while view:
            seconds = min(self._left(), self.silence)
            if not self._readable.poll(None if seconds == math.inf else seconds * 1000):
                raise WireError("late", f"nothing came for {seconds:.3g} s")
            try:
                got = self._sock.recv_into(view)
            except OSError as error:
                raise WireError("lost", f"the connection ended: {error}") from error
            if not got:
                raise WireError("lost", "the connection ended")
            view = view[got:]
        return found

    def write(self, data: Buffer) -> None:
        """Write all of these bytes."""
        left = self._left()
        try:
            self._sock.settimeout(None if left == math.inf else left)
            self._sock.sendall(data)
        except TimeoutError as error:
            raise WireError("late", "it does not read what it is sent") from error
        except OSError as error:
            raise WireError("lost", f"the connection ended: {error}") from error

    def finish(self) -> None:
        """Write no more."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection, also for another thread that uses it; bytes on their way may be lost."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise WireError("late", "nothing came in time")
        return left
