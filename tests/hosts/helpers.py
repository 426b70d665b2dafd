"""Hosts that meet within one process."""

import queue
import threading
from dataclasses import replace

from mtp_jax.errors import ConfigError
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.leader_log import LeaderLog
from mtp_jax.hosts.options import Hosts
from mtp_jax.wire.credentials import Credentials
from tests.hosts.ranks import two_free_ports

SECRET = Credentials(b"a secret of the tests")


class Meeting:
    """A leader and what it is told, on a port of its own."""

    def __init__(self, hosts: int = 2, seconds: float = 20, own: Credentials = SECRET) -> None:
        self.hosts = Hosts(hosts, 0, f"127.0.0.1:{two_free_ports()}", join_seconds=seconds)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.leader = LeaderLog(self.hosts, own, self.lost.put)
        self.failed: Exception | None = None

        def join() -> None:
            try:
                self.leader.join()
            except ConfigError as error:
                self.failed = error

        self.thread = threading.Thread(target=join)
        self.thread.start()

    def follower(self, rank: int = 1, own: Credentials = SECRET) -> FollowerLog:
        return FollowerLog(replace(self.hosts, rank=rank), own, self.lost.put)

    def joined(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.failed is None
