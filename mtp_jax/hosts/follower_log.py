"""A follower's side of the launch log: the leader's messages, in order."""

import queue
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from mtp_jax.errors import ConfigError
from mtp_jax.hosts import messages
from mtp_jax.hosts.channel import Channel
from mtp_jax.hosts.leader_log import PURPOSE, RANK
from mtp_jax.hosts.messages import HostMessage, LogError, Logged
from mtp_jax.hosts.options import Hosts
from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.handshake import greet
from mtp_jax.wire.signed import Seals

_PROOF_SECONDS = 10.0
_AGAIN_SECONDS = 0.1
T = TypeVar("T")


class FollowerLog:
    """The connection to the leader. ``lost`` is called, on a thread of its own, with the cause of the end."""

    def __init__(self, hosts: Hosts, own: Credentials, lost: Callable[[str], None]) -> None:
        """Wait for the leader, and connect. Raises ConfigError."""
        self._lost, self._ended = lost, False
        self._inbox: queue.SimpleQueue[Logged] = queue.SimpleQueue()
        self._channel = Channel(*_joined(hosts, own), self._got, self._gone)
        self._channel.start()

    def compare(self, mine: Mapping[str, str]) -> None:
        """Send the options of this process. Raises ConfigError if other ranks have different options."""
        self._channel.send(messages.Hello(tuple(mine.items())))
        answer = self.receive()
        if isinstance(answer, messages.Refused):
            raise ConfigError(answer.reason)
        if not isinstance(answer, messages.Welcome):
            raise LogError(f"{type(answer).__name__} came where Welcome was due")

    def least(self, mine: int) -> int:
        """The least of all ranks' numbers, of which this is this rank's."""
        self._channel.send(messages.Proposed(mine))
        return self.expect(messages.Agreed).count

    def receive(self) -> Logged:
        """Wait for the next message."""
        return self._inbox.get()

    def expect(self, wanted: type[T]) -> T:
        """Wait for the next message. Raises LogError for a message of another kind."""
        message = self.receive()
        if not isinstance(message, wanted):
            raise LogError(f"{type(message).__name__} came where {wanted.__name__} was due")
        return message

    def compiled(self, job: int) -> None:
        """Report that a program is compiled."""
        self._say(messages.Compiled(job))

    def finish(self) -> None:
        """Close the connection after the leader's end."""
        self._channel.close()

    def close(self, reason: str) -> None:
        """End the connection, and send the reason."""
        self._say(messages.Failed(reason))
        self._channel.close()

    def _say(self, message: HostMessage) -> None:
        with suppress(WireError):  # the reader sees the end
            self._channel.send(message)

    def _got(self, message: Logged) -> None:
        if isinstance(message, messages.Failed):
            if not self._ended:
                self._lost(f"rank 0 failed: {message.reason}"[:500])
            return
        self._ended |= isinstance(message, messages.End | messages.Refused)
        self._inbox.put(message)

    def _gone(self, reason: str) -> None:
        if not self._ended:
            self._lost(f"rank 0 is lost: {reason}")


def _joined(hosts: Hosts, own: Credentials) -> tuple[Connection, Seals]:
    """Connect to the leader, and wait until it has accepted this rank. Raises ConfigError.

    While there is time, it tries again if no process listens yet, if the connection is lost, or if the leader
    does not answer: many strangers at its port may push this rank's connection out before it has proved
    itself.
    """
    host, port = hosts.address
    end = time.monotonic() + hosts.join_seconds
    while True:
        left = end - time.monotonic()
        try:
            sock = socket.create_connection((host, port), timeout=max(left, _AGAIN_SECONDS))
        except OSError as error:
            if left <= 0:
                raise ConfigError(
                    f"rank 0 does not listen at {host}:{port}: {error}; start it, and see that all ranks "
                    "have the same coordinator and log_port"
                ) from error
            time.sleep(_AGAIN_SECONDS)
            continue
        connection = Connection(sock, time.monotonic() + _PROOF_SECONDS)
        try:
            return connection, greet(connection, own, PURPOSE, RANK.pack(hosts.rank))
        except WireError as refused:
            connection.close()
            if left <= 0 or refused.reason not in ("lost", "late"):
                how = "; give all ranks the same secret, and each a rank of its own"
                raise ConfigError(
                    f"rank 0 does not take rank {hosts.rank} at {host}:{port}: {refused}"
                    + ("" if refused.reason == "tls" else how)
                ) from refused
        time.sleep(_AGAIN_SECONDS)
