"""A port for members and strangers, whose messages tell them apart."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_MOST_STRANGERS = 64
_AGAIN_SECONDS = 0.1


class Door:
    """Meets each connection on a thread of its own. It is a stranger until ``proved`` is called for it.

    There are 64 strangers at most. A further stranger ends the oldest, so that none can keep members out by
    saying nothing.
    """

    def __init__(
        self, listener: socket.socket, meet: Callable[[socket.socket, str], None], name: str
    ) -> None:
        """listener: a bound socket. meet: called with a connection and its address; closes the connection.

        name: name of the threads.
        """
        self._listener, self._meet, self._name = listener, meet, name
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closing = False

    def open(self) -> None:
        """Begin to listen, unless the door is closed already."""
        try:
            self._listener.listen(_MOST_STRANGERS)
        except OSError:
            if not self._closing:
                raise
        threading.Thread(target=self._accept, name=f"{self._name}s", daemon=True).start()

    def proved(self, sock: socket.socket) -> bool:
        """Let a connection stay, as a member. Returns False if it has been ended already."""
        with self._lock:
            return self._strangers.pop(sock, sock) is None

    def close(self) -> None:
        """Listen no more, and end all strangers."""
        self._closing = True
        with self._lock:
            strangers = [*self._strangers]
        for sock in (self._listener, *strangers):
            end(sock)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, (host, port, *_) = self._listener.accept()
            except OSError:
                if not self._closing:
                    time.sleep(_AGAIN_SECONDS)  # for want of file descriptors
                continue
            with self._lock:
                self._strangers[sock] = None
                oldest = next(iter(self._strangers))
                if len(self._strangers) > _MOST_STRANGERS:
                    del self._strangers[oldest]
                    end(oldest)
            args = sock, f"{host}:{port}"
            threading.Thread(target=self._one, args=args, name=self._name, daemon=True).start()

    def _one(self, sock: socket.socket, peer: str) -> None:
        try:
            self._meet(sock, peer)
        finally:
            self.proved(sock)


def end(sock: socket.socket) -> None:
    """End a connection, or a listener, that another thread waits at: that thread sees it at once."""
    with suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)
