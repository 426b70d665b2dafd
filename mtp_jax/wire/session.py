"""TLS without a socket: bytes in, bytes out."""

import ssl
import threading

from mtp_jax.wire.tls import Tls, digest


class TlsSession:
    """One connection's TLS. One thread may read while another writes, which OpenSSL itself does not allow.

    The bytes of the connection go through memory (``ssl.MemoryBIO``), so that a lock is held while they are
    encrypted or decrypted, and never while they travel. Raises ``ssl.SSLError`` where the sides disagree.
    """

    def __init__(self, tls: Tls, listens: bool) -> None:
        """listens: whether this side listens, and is TLS's server."""
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.listening if listens else tls.calling
        self._tls = context.wrap_bio(self._came, self._leaves, server_side=listens)
        self._own, self._listens, self._lock = tls.certificate, listens, threading.Lock()

    def take_in(self, data: memoryview) -> None:
        """Take bytes that have come over the connection."""
        with self._lock:
            self._came.write(data)

    def to_send(self) -> bytes:
        """Bytes that are to be sent over the connection."""
        with self._lock:
            return self._leaves.read()

    def begin(self) -> bool:
        """Go on with the handshake. Returns whether it is done; if not, bytes must come."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def certificate(self) -> bytes:
        """The digest of the certificate of the side that listens."""
        shown = None if self._listens else self._tls.getpeercert(binary_form=True)
        return self._own if shown is None else digest(shown)

    def decrypt(self, into: memoryview) -> int:
        """Decrypt into a buffer. Returns the number of its bytes; 0: more must come first."""
        try:
            with self._lock:
                return self._tls.read(len(into), into)  # pyright: ignore[reportArgumentType, reportReturnType]
        except ssl.SSLWantReadError:
            return 0

    def encrypt(self, data: memoryview) -> bytes:
        """Encrypt bytes. Returns bytes that are to be sent over the connection."""
        with self._lock:
            self._tls.write(data)
            return self._leaves.read()
