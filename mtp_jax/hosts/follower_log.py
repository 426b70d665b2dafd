"""A follower's side of the launch log: what the leader says, in order."""

import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mtp_jax.errors import ConfigError
from mtp_jax.handshake import Refused, greet
from mtp_jax.hosts.channel import Channel, Message, Op
from mtp_jax.hosts.codec import LogError
from mtp_jax.hosts.leader_log import PURPOSE, RANK, wait_for_address
from mtp_jax.hosts.options import Hosts

_PROOF_SECONDS = 10.0


class FollowerLog:
    """The connection to the leader. ``lost`` is called, on a thread of its own, with what ends the group."""

    def __init__(self, hosts: Hosts, secret: bytes, lost: Callable[[str], None]) -> None:
        """Connects, once the leader is there. Raises ConfigError."""
        self._lost, self._ended = lost, False
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        sock = wait_for_address(hosts.address, time.monotonic() + hosts.join_seconds)
        try:
            greet(sock, secret, PURPOSE, RANK.pack(hosts.rank), time.monotonic() + _PROOF_SECONDS)
        except Refused as refused:
            sock.close()
            host, port = hosts.address
            raise ConfigError(
                f"rank 0 does not take rank {hosts.rank} at {host}:{port}: {refused}; give all ranks the "
                "same secret, and each a rank of its own"
            ) from refused
        self._channel = Channel(sock, self._got, self._gone)
        self._channel.start()

    def compare(self, mine: Mapping[str, str]) -> None:
        """Say what this process is about to do. Raises ConfigError if others do something else."""
        self._channel.send(Op.HELLO, mine)
        said = self.receive(Op.WELCOME, Op.REFUSED)
        if said.op is Op.REFUSED:
            raise ConfigError(str(said.body.fields.get("reason")))

    def receive(self, *wanted: Op) -> Message:
        """The next message, once it is there. Raises LogError for one of another kind."""
        message = self._inbox.get()
        if wanted and message.op not in wanted:
            raise LogError(f"{message.op.name} came where {' or '.join(op.name for op in wanted)} was due")
        return message

    def compiled(self, job: int) -> None:
        """Say that a program is compiled."""
        self._say(Op.COMPILED, {"job": job})

    def finish(self) -> None:
        """The leader has ended, all is done."""
        self._channel.close()

    def close(self, reason: str) -> None:
        """End the connection, and say why."""
        self._say(Op.FAILED, {"reason": reason})
        self._channel.close()

    def _say(self, op: Op, fields: Mapping[str, Any]) -> None:
        with suppress(OSError):  # that it ended is seen by who reads
            self._channel.send(op, fields)

    def _got(self, message: Message) -> None:
        if message.op is Op.FAILED:
            if not self._ended:
                self._lost(f"rank 0 failed: {message.body.fields.get('reason')}"[:500])
            return
        self._ended |= message.op in (Op.END, Op.REFUSED)
        self._inbox.put(message)

    def _gone(self, reason: str) -> None:
        if not self._ended:
            self._lost(f"rank 0 is lost: {reason}")
