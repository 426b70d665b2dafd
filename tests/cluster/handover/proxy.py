"""A TCP proxy that does harm to what a server sends, for the tests of hand-overs."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Harm = Callable[[int, bytes], bytes | None]
"""The number of bytes that went before, and the next ones, to those that are passed on; None: end it."""


class Proxy:
    """Passes connections on to an address.

    Attributes:
        address: of this side.
        passed: bytes that the server has sent.
    """

    def __init__(self, target: tuple[str, int], harm: Harm = lambda at, data: data) -> None:
        self._target, self._harm, self.passed = target, harm, 0
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._closed.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for run in (self._up, self._down):
                    threading.Thread(target=run, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(2**16):
                server.sendall(data)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        at, harmed = 0, b""
        with suppress(OSError), client, server:
            while data := server.recv(2**16):
                harmed = self._harm(at, data)
                at += len(data)
                self.passed = at
                if harmed is None:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(harmed)
            if at and not harmed:
                self._closed.wait()  # of a stalled connection the client does not see the end either


def flip(offset: int) -> Harm:
    """One bit of the byte at an offset."""

    def harm(at: int, data: bytes) -> bytes:
        i = offset - at
        return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] if 0 <= i < len(data) else data

    return harm


def cut(offset: int) -> Harm:
    """The connection, at an offset."""
    return lambda at, data: None if at + len(data) > offset else data


def stall(offset: int) -> Harm:
    """Nothing more comes from the piece on that has the byte at an offset."""
    return lambda at, data: b"" if at + len(data) > offset else data
