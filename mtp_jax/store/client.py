"""The side that decodes: it asks others for the pages of a prompt. A fault means fewer pages, no error."""

import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mtp_jax.store.page import Page, checksum, size
from mtp_jax.store.wire import Connection, PeerError, field, greet

_LOG = logging.getLogger(__name__)


class Peers:
    """Servers that prefill. Any thread may ask.

    Attributes:
        received: pages.
        failures: hand-overs that did not come to their end, by reason.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes, seconds: float) -> None:
        """seconds: most that one hand-over may take."""
        self.received, self.failures = 0, Counter[str]()
        self._addresses, self._secret, self._seconds = addresses, secret, seconds

    def fetch(
        self, ids: Sequence[int], salt: str, digests: Sequence[bytes], first: int, like: Page, identity: str
    ) -> list[tuple[Page, int]]:
        """The pages of a prompt from number ``first`` on and their checksums, as many as came whole in time.

        Prompts that begin with the same page go to the same server, whose prefix cache has it then.

        digests: of all its full pages. like: a page, for its shapes and types. identity: what pages depend
        on besides tokens.
        """
        pages: list[tuple[Page, int]] = []
        address = self._addresses[int.from_bytes(digests[0][:8], "big") % len(self._addresses)]
        deadline = time.monotonic() + self._seconds
        try:
            try:
                connected = socket.create_connection(address, timeout=self._seconds)
            except OSError as error:
                raise PeerError("unreachable", f"{address[0]}:{address[1]}: {error}") from error
            with connected:
                connection = Connection(connected, deadline)
                greet(connection, self._secret, identity)
                about = {"salt": salt, "first": first, "seconds": max(deadline - time.monotonic(), 1e-3)}
                connection.send("prefill", about, [np.asarray(ids, "<i4").data])
                for digest in digests[first:]:
                    page = _receive(connection, digest, like, identity)
                    if page is None:
                        break
                    pages.append(page)
                else:  # so that the server does not take a closed connection for a lost one
                    connection.receive("end")
        except PeerError as error:
            self.failures[error.reason] += 1
            _LOG.warning("%d of %d pages were handed over: %s", len(pages), len(digests) - first, error)
        self.received += len(pages)
        return pages


def _receive(connection: Connection, digest: bytes, like: Page, identity: str) -> tuple[Page, int] | None:
    """The next page and its checksum; None at the end. Raises PeerError."""
    kind, header, body = connection.receive("page", "end", most=size(like))
    if kind == "end":
        return None
    if field(header, "identity", str) != identity:
        raise PeerError("config", "the weights of the other side were replaced meanwhile")
    if field(header, "digest", str) != digest.hex() or len(body) != size(like):
        raise PeerError("protocol", "a page that was not asked for")
    arrays, at = [], 0
    for array in like:
        arrays.append(np.frombuffer(body, array.dtype, array.size, at).reshape(array.shape))
        at += array.nbytes
    page, crc = tuple(arrays), field(header, "crc", int)
    if checksum(page) != crc:
        raise PeerError("damaged")
    return page, crc
