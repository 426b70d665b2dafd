"""Rank 0's side of the launch log: takes the followers in, and tells all of them the same in one order."""

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from mtp_jax.errors import ConfigError
from mtp_jax.hosts import messages
from mtp_jax.hosts.channel import Channel, prepared
from mtp_jax.hosts.hello import difference
from mtp_jax.hosts.messages import HostMessage, LogError, Logged
from mtp_jax.hosts.options import Hosts
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.door import Door
from mtp_jax.wire.handshake import welcome
from mtp_jax.wire.secret import VARIABLE

T = TypeVar("T", bound=HostMessage)
_LOG = logging.getLogger(__name__)
PURPOSE, RANK = b"mtp-jax log 6\n", struct.Struct("<I")
"""The purpose of the handshake, and the form of a follower's rank in it."""
_PROOF_SECONDS = 5.0  # time for a connection to prove itself


class LeaderLog:
    """One connection per follower. ``lost`` is called, on a thread of its own, with the cause of the end."""

    def __init__(self, hosts: Hosts, own: Credentials, lost: Callable[[str], None]) -> None:
        """Listen. Raises ConfigError."""
        self._hosts, self._own, self._lost = hosts, own, lost
        self._channels: dict[int, Channel] = {}
        self._taken: set[int] = set()
        self._refused: dict[int, str] = {}  # rank -> the last address that claimed it with another secret
        self._finished = False
        self._told: list[tuple[int, HostMessage]] = []  # messages of followers, to be waited for
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        host, port = hosts.address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"the launch log cannot have {host}:{port}: {error.strerror}; the coordinator must be an "
                "address of rank 0's host, or give another log_port"
            ) from error
        self._door = Door(listener, self._prove, "log-proof")

    def join(self) -> None:
        """Wait for every follower. Raises ConfigError if they do not all come in time.

        No connection without the secret ends the wait, as its sender may be a stranger under any name.
        """
        self._door.open()
        with self._changed:
            self._changed.wait_for(lambda: not self._absent(), self._hosts.join_seconds)
            reason = self._missing()
        self._door.close()
        if reason:
            self.close(reason)
            raise ConfigError(reason)

    def _absent(self) -> list[int]:
        return [rank for rank in range(1, self._hosts.hosts) if rank not in self._channels]

    def _missing(self) -> str:
        """The reason why the group is incomplete; "" if it is complete."""
        absent = self._absent()
        if not absent:
            return ""
        strangers = [(r, self._refused[r]) for r in absent if r in self._refused]
        others = [f"{peer} came as rank {rank} with another secret" for rank, peer in strangers]
        late = f"did not come in {self._hosts.join_seconds:g} s"
        how = f"start it with coordinator = {self._hosts.coordinator} and the same secret"
        which = f"rank {', '.join(map(str, absent))} of {self._hosts.hosts}"
        return "; ".join([f"{which} {late}", *others, f"{how} (--secret-file, or {VARIABLE})"])

    def compare(self, mine: Mapping[str, str]) -> None:
        """Check that all followers have the same options. Raises ConfigError for the first difference."""
        for rank in sorted(self._channels):
            theirs = dict(self._wait(rank, messages.Hello).description)
            if found := difference(mine, theirs, rank):
                self._finished = True  # each rank ends by itself, for this reason
                self.send(messages.Refused(found))
                raise ConfigError(found)
        self.send(messages.Welcome())

    def least(self, mine: int) -> int:
        """The least of all ranks' numbers, of which this is rank 0's."""
        found = min([mine, *(self._wait(rank, messages.Proposed).count for rank in sorted(self._channels))])
        self.send(messages.Agreed(found))
        return found

    def send(self, message: Logged) -> None:
        """Send a message to all followers. Ends the group if it does not reach one."""
        sent = prepared(message)
        with self._sending:
            for rank, channel in self._channels.items():
                try:
                    channel.signed.send_framed(sent)
                except WireError as error:
                    self._gone(rank, str(error))

    def compiled(self, job: int) -> None:
        """Wait until every follower has compiled the program with this number (``messages.Compile``)."""
        for rank in sorted(self._channels):
            self._wait(rank, messages.Compiled, messages.Compiled(job))

    def finish(self) -> None:
        """End the work: let the followers leave."""
        self._finished = True  # from here on followers may leave
        self.send(messages.End())
        for channel in self._channels.values():
            channel.finish()

    def close(self, reason: str) -> None:
        """End the connections, and send the reason."""
        self._door.close()
        if self._sending.acquire(timeout=0.2):  # a sender may be stuck
            for channel in self._channels.values():
                with suppress(WireError):
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

    def _got(self, rank: int, message: Logged) -> None:
        if isinstance(message, messages.Failed):
            if not self._finished:
                self._lost(f"rank {rank} failed: {message.reason}"[:500])
        elif isinstance(message, messages.Hello | messages.Proposed | messages.Compiled):
            with self._changed:
                self._told.append((rank, message))
                self._changed.notify_all()
        else:
            raise LogError(f"a follower may not send {type(message).__name__}")

    def _gone(self, rank: int, reason: str) -> None:
        if not self._finished:
            self._lost(f"rank {rank} is lost: {reason}")

    # Newcomers

    def _prove(self, sock: socket.socket, peer: str) -> None:
        """Accept a connection of a missing follower; drop any other connection."""
        given: list[int] = []

        def take(claim: bytes) -> None:
            if not self._door.proved(sock):
                raise WireError("lost", "others came")
            given.append(self._take(claim))

        try:
            connection = Connection(sock, time.monotonic() + _PROOF_SECONDS)
            claim, seals = welcome(connection, self._own, PURPOSE, RANK.size, take)
            (rank,) = RANK.unpack(claim)
            channel = Channel(connection, seals, partial(self._got, rank), partial(self._gone, rank))
            with self._changed:
                self._channels[rank] = channel
                self._changed.notify_all()
            channel.start()
        except WireError as refused:
            sock.close()
            with self._changed:
                self._taken.difference_update(given)  # the rank was lost meanwhile, and may connect again
            _LOG.warning("launch log: dropped a connection from %s: %s", peer, refused)
            if refused.reason == "secret" and refused.claim is not None:
                self._note(peer, *RANK.unpack(refused.claim))

    def _note(self, peer: str, rank: int) -> None:
        """Record a connection that claimed this rank with another secret."""
        with self._changed:
            if rank not in self._absent():
                return
            if rank not in self._refused:
                _LOG.error(
                    "launch log: wrong secret from %s, which says it is rank %d; that rank is waited for",
                    peer,
                    rank,
                )
            self._refused[rank] = peer

    def _take(self, claim: bytes) -> int:
        """Give a rank to the first connection with the secret that claims it. Raises WireError."""
        (rank,) = RANK.unpack(claim)
        with self._changed:
            if not 0 < rank < self._hosts.hosts:
                said = f"rank {rank} is none of the followers', 1 to {self._hosts.hosts - 1}"
                raise WireError("config", said, claim)
            if rank in self._taken:
                raise WireError("config", f"rank {rank} is there already", claim)
            self._taken.add(rank)
        return rank
