"""A connection of the launch log: messages both ways, and a sign of life every few seconds."""

import math
import threading
from collections.abc import Callable

from mtp_jax.decode.launches import Launch
from mtp_jax.hosts.messages import KINDS, Alive, HostMessage, LogError, Logged
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.signed import MOST_BYTES, Seals, Signed, framed

# A peer that pauses for longer, or whose host has vanished, is lost. JAX's own service would end the process
# without a readable line after its 10 s.
ALIVE_SECONDS = 2.0
SILENT_SECONDS = 3 * ALIVE_SECONDS
_MOST_JSON = 1 << 20


class Channel:
    """A connection whose other end has proved itself. ``got`` and ``lost`` are called on a thread of its own.

    got: called with each message. lost: called once with the reason of the end, but not after ``close``.

    Attributes:
        signed: the signed connection that messages travel over.
    """

    def __init__(
        self,
        connection: Connection,
        seals: Seals,
        got: Callable[[Logged], None],
        lost: Callable[[str], None],
    ) -> None:
        connection.deadline, connection.silence = math.inf, SILENT_SECONDS
        self._connection, self._got, self._lost = connection, got, lost
        self.signed = Signed(connection, seals, KINDS, _MOST_JSON)
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="log-read", daemon=True)

    def start(self) -> None:
        """Start to read, and to send signs of life."""
        self._reader.start()
        threading.Thread(target=self._live, name="log-live", daemon=True).start()

    def send(self, message: Logged) -> None:
        """Send a message. Raises WireError."""
        self.signed.send_framed(prepared(message))

    def finish(self) -> None:
        """Send no more, and wait for the other end to read everything and close, for a limited time."""
        self._closed.set()
        self._connection.finish()
        if self._reader.ident is not None:
            self._reader.join(SILENT_SECONDS)
        self._connection.close()

    def close(self) -> None:
        """End the connection now: messages that have not arrived may be lost."""
        self._closed.set()
        self._connection.close()

    def _live(self) -> None:
        while not self._closed.wait(ALIVE_SECONDS):
            try:
                self.send(Alive())
            except WireError:
                return  # the reader handles the loss

    def _read(self) -> None:
        try:
            while True:
                message = self.signed.receive(MOST_BYTES)
                if not isinstance(message, HostMessage | Launch):
                    raise LogError(f"a {type(message).__name__} is no message")
                if not isinstance(message, Alive):
                    self._got(message)
        except Exception as error:  # after an error reading ends
            if not self._closed.is_set():
                known = isinstance(error, WireError)
                self._lost(str(error) if known else f"{type(error).__name__}: {error}")
        finally:
            self.close()


def prepared(message: Logged) -> bytes:
    """A message that may be sent on several channels. Raises WireError."""
    return framed(message, _MOST_JSON, pack=not (isinstance(message, Launch) and message.dense))
