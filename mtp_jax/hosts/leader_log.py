"""Rank 0's side of the launch log: takes the followers in, and tells all of them the same in one order."""

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mtp_jax.decode.launches import Launch
from mtp_jax.errors import ConfigError
from mtp_jax.handshake import VARIABLE, Refused, welcome
from mtp_jax.hosts import messages
from mtp_jax.hosts.channel import Channel, prepared
from mtp_jax.hosts.hello import difference
from mtp_jax.hosts.messages import LogError, Message
from mtp_jax.hosts.options import Hosts

T = TypeVar("T", bound=Message)
_LOG = logging.getLogger(__name__)
PURPOSE, RANK = b"mtp-jax log 3\n", struct.Struct("<I")
"""What the handshake is for, and how a follower's rank is written in it."""
_PROOF_SECONDS = 5.0  # in which a connection must have proved itself
_SECRET_SECONDS = 10.0  # in which a rank with another secret may be followed by the one with ours
_MOST_STRANGERS = 64  # connections that may be at it at a time


class LeaderLog:
    """One connection per follower. ``lost`` is called, on a thread of its own, with what ends the group."""

    def __init__(self, hosts: Hosts, secret: bytes, lost: Callable[[str], None]) -> None:
        """Listens. Raises ConfigError."""
        self._hosts, self._secret, self._lost = hosts, secret, lost
        self._channels: dict[int, Channel] = {}
        self._taken: set[int] = set()
        # Of ranks that came with another secret: who it was, and when the wait for the right one ends.
        self._refused: dict[int, tuple[str, float]] = {}
        self._finished = False
        self._told: list[tuple[int, Message]] = []  # what followers said, to be waited for
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        host, port = hosts.address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"the launch log cannot have {host}:{port}: {error.strerror}; the coordinator must be an "
                "address of rank 0's host, or give another log_port"
            ) from error

    def join(self) -> None:
        """Wait for every follower. Raises ConfigError if they do not all come in time.

        A missing rank that came with another secret is waited for a few seconds more: it may have been a
        stranger's. What does not speak the log's protocol changes nothing.
        """
        threading.Thread(target=self._accept, name="log-accept", daemon=True).start()
        end = time.monotonic() + self._hosts.join_seconds
        with self._changed:
            while (reason := self._missing(end)) is None:
                self._changed.wait(min([end, *self._ends()]) - time.monotonic())
        self._close_listener()
        if reason:
            self.close(reason)
            raise ConfigError(reason)

    def _absent(self) -> list[int]:
        return [rank for rank in range(1, self._hosts.hosts) if rank not in self._channels]

    def _ends(self) -> list[float]:
        return [self._refused[rank][1] for rank in self._absent() if rank in self._refused]

    def _missing(self, end: float) -> str | None:
        """Why the group does not come together, "" if it has; None while there is time."""
        now, absent = time.monotonic(), self._absent()
        for rank in absent:
            peer, until = self._refused.get(rank, ("", end))
            if peer and until <= now:
                return (
                    f"rank {rank} of {self._hosts.hosts} has another secret ({peer}); give all ranks the "
                    f"same with --secret-file or {VARIABLE}"
                )
        if absent and end <= now:
            return (
                f"rank {', '.join(map(str, absent))} of {self._hosts.hosts} did not come in "
                f"{self._hosts.join_seconds:g} s; start it with the same secret and coordinator = "
                f"{self._hosts.coordinator}"
            )
        return None if absent else ""

    def compare(self, mine: Mapping[str, str]) -> None:
        """Check that all followers are about to do the same. Raises ConfigError for the first difference."""
        for rank in sorted(self._channels):
            theirs = dict(self._wait(rank, messages.Hello).description)
            if found := difference(mine, theirs, rank):
                self._finished = True  # each rank ends by itself, with this as its reason
                self.send(messages.Refused(found))
                raise ConfigError(found)
        self.send(messages.Welcome())

    def send(self, message: Message | Launch[Any]) -> None:
        """Tell all followers. Ends the group if one cannot be told."""
        body = prepared(message)
        with self._sending:
            for rank, channel in self._channels.items():
                try:
                    channel.send_body(*body)
                except OSError as error:
                    self._gone(rank, str(error))

    def compiled(self, job: int) -> None:
        """Wait until every follower has compiled what ``COMPILE`` of this number asked for."""
        for rank in sorted(self._channels):
            self._wait(rank, messages.Compiled, messages.Compiled(job))

    def finish(self) -> None:
        """All is done: let the followers go."""
        self._finished = True  # from here on they may go
        self.send(messages.End())
        for channel in self._channels.values():
            channel.finish()

    def close(self, reason: str) -> None:
        """End the connections, and say why."""
        self._close_listener()
        if self._sending.acquire(timeout=0.2):  # whoever has it may be stuck
            for channel in self._channels.values():
                with suppress(OSError):
                    channel.send(messages.Failed(reason))
        for channel in list(self._channels.values()):
            channel.close()

    def _wait(self, rank: int, kind: type[T], wanted: T | None = None) -> T:
        """A follower's message of this kind, or ``wanted``. The group ends if it is lost meanwhile."""
        found: list[T] = []

        def said() -> bool:
            own = [m for r, m in self._told if r == rank and isinstance(m, kind)]
            found[:] = own if wanted is None else [m for m in own if m == wanted]
            return bool(found)

        with self._changed:
            self._changed.wait_for(said)
            self._told.remove((rank, found[0]))
        return found[0]

    def _got(self, rank: int, message: Message | Launch[Any]) -> None:
        if isinstance(message, messages.Failed):
            if not self._finished:
                self._lost(f"rank {rank} failed: {message.reason}"[:500])
        elif isinstance(message, messages.Hello | messages.Compiled):
            with self._changed:
                self._told.append((rank, message))
                self._changed.notify_all()
        else:
            raise LogError(f"a follower may not send {type(message).__name__}")

    def _gone(self, rank: int, reason: str) -> None:
        if not self._finished:
            self._lost(f"rank {rank} is lost: {reason}")

    # Those who come

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, port, *_) = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            prove = partial(self._prove, sock, f"{host}:{port}")
            threading.Thread(target=prove, name="log-proof", daemon=True).start()

    def _prove(self, sock: socket.socket, peer: str) -> None:
        """Take a connection in if it is a follower that is missing; else drop it and go on waiting."""
        try:
            end = time.monotonic() + _PROOF_SECONDS
            (rank,) = RANK.unpack(welcome(sock, self._secret, PURPOSE, RANK.size, end, self._take))
            channel = Channel(sock, partial(self._got, rank), partial(self._gone, rank))
            with self._changed:
                self._channels[rank] = channel
                self._changed.notify_all()
            channel.start()
        except Refused as refused:
            sock.close()
            _LOG.warning("launch log: dropped a connection from %s: %s", peer, refused)
            if refused.reason == "secret" and refused.claim is not None:
                self._note(peer, *RANK.unpack(refused.claim))
        finally:
            self._strangers.release()

    def _note(self, peer: str, rank: int) -> None:
        """Somebody who speaks the log's protocol came as this rank, with another secret."""
        with self._changed:
            if rank not in self._absent():
                return
            _LOG.error(
                "launch log: wrong secret from %s, which says it is rank %d: the start ends unless that rank "
                "comes with the right one in %g s", peer, rank, _SECRET_SECONDS,
            )  # fmt: skip
            self._refused.setdefault(rank, (peer, time.monotonic() + _SECRET_SECONDS))
            self._changed.notify_all()

    def _take(self, claim: bytes) -> None:
        """Give a rank to the one who knows the secret and asks first. Raises Refused."""
        (rank,) = RANK.unpack(claim)
        with self._changed:
            if not 0 < rank < self._hosts.hosts:
                said = f"rank {rank} is none of the followers', 1 to {self._hosts.hosts - 1}"
                raise Refused("config", said, claim)
            if rank in self._taken:
                raise Refused("config", f"rank {rank} is there already", claim)
            self._taken.add(rank)

    def _close_listener(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake who accepts
        self._listener.close()


def wait_for_address(address: tuple[str, int], end: float) -> socket.socket:
    """A connection to it, once somebody listens there. Raises ConfigError at ``time.monotonic() == end``."""
    while True:
        try:
            return socket.create_connection(address, timeout=max(end - time.monotonic(), 0.1))
        except OSError as error:
            if time.monotonic() >= end:
                host, port = address
                raise ConfigError(
                    f"rank 0 does not listen at {host}:{port}: {error}; start it, and see that all ranks "
                    "have the same coordinator and log_port"
                ) from error
            time.sleep(0.05)
