"""Bytes over a socket, each operation in time."""

import math
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mtp_jax.wire.session import TlsSession

Buffer = bytes | bytearray | memoryview
_AT_ONCE = 2**18  # bytes that are encrypted, or decrypted, at a time


class WireError(Exception):
    """The other side does not belong here, breaks the protocol, or says nothing in time.

    Attributes:
        reason: "lost", "late", "damaged", "protocol", "tls", "secret" or "config" (its options do not fit),
            or a word of a protocol's own.
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
        self._session: TlsSession | None = None
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        with suppress(OSError):  # not TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start_tls(self, session: TlsSession) -> None:
        """Encrypt everything from here on, in both directions. Raises WireError where the sides disagree."""
        with _of_tls():
            try:
                while not session.begin():
                    self._send(session.to_send())
                    self._take_in(session)
            except ssl.SSLError:
                with suppress(WireError):  # the other side has ended first
                    self._send(session.to_send())
                raise
            self._send(session.to_send())
        self._session = session

    def read(self, count: int) -> bytearray:
        """Read the next ``count`` bytes."""
        found = bytearray(count)
        view = memoryview(found)
        while view:
            view = view[self._some(view) :]
        return found

    def write(self, data: Buffer) -> None:
        """Write all of these bytes."""
        if self._session is None:
            self._send(data)
            return
        parts = memoryview(data)
        for begin in range(0, len(parts), _AT_ONCE):
            with _of_tls():
                encrypted = self._session.encrypt(parts[begin : begin + _AT_ONCE])
            self._send(encrypted)

    def _some(self, view: memoryview) -> int:
        """Read into a buffer. Returns the number of bytes; 0: none, as more must come to be decrypted."""
        if self._session is None:
            return self._receive(view)
        with _of_tls():
            got = self._session.decrypt(view)
        if not got:
            self._take_in(self._session)
        return got

    def _take_in(self, session: TlsSession) -> None:
        came = memoryview(bytearray(_AT_ONCE))
        session.take_in(came[: self._receive(came)])

    def _receive(self, view: memoryview) -> int:
        """Read one byte or more into a buffer. Returns their number."""
        seconds = min(self._left(), self.silence)
        if not self._readable.poll(None if seconds == math.inf else seconds * 1000):
            raise WireError("late", f"nothing came for {seconds:.3g} s")
        try:
            got = self._sock.recv_into(view)
        except OSError as error:
            raise WireError("lost", f"the connection ended: {error}") from error
        if not got:
            raise WireError("lost", "the connection ended")
        return got

    def _send(self, data: Buffer) -> None:
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


@contextmanager
def _of_tls() -> Iterator[None]:
    """A block whose errors of TLS become WireError."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        said = f"its certificate is not taken: {error.verify_message}; see --tls-ca"
        raise WireError("tls", said) from error
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" not in reason:
            raise WireError("damaged", f"TLS: {reason}") from error
        said = f"it has ended TLS: {reason}; see --tls-cert and --tls-ca of both sides"
        raise WireError("tls", said) from error
