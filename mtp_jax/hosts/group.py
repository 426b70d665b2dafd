"""A process's place in its group: joined before JAX knows its devices, left when all work is done.

    with join(Hosts(2, rank, "10.0.0.1:9000")) as group: ...      log connected -> JAX's processes connected

Rank 0 then makes an ``LLM`` with ``group=group``; the other ranks call ``follow`` with the same options.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax

from mtp_jax.decode.launches import Runner
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.hosts.ending import STATUS, Ending
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.leader import LeaderRunner
from mtp_jax.hosts.leader_log import LeaderLog
from mtp_jax.hosts.options import Hosts

# JAX's own service notices a loss later than the launch log, which takes hundredths of a second, or 6 s.
_HEARTBEAT_SECONDS = 10
_SHUTDOWN_SECONDS = 10
_REFUSED_STATUS = 2  # an error that the user can mend
_INTERRUPTED_STATUS = 130


class Group:
    """This process in its group. As a context, its end is the end of the group's work.

    Attributes:
        hosts: the options of the group.
        log: the launch log; a ``LeaderLog`` on rank 0, a ``FollowerLog`` elsewhere.
        ending: ends the process when the group cannot go on.
    """

    def __init__(self, hosts: Hosts, end: Callable[[int], object] = os._exit) -> None:
        """Connects to the other ranks. Raises ConfigError. end: ends the process."""
        self.hosts, self._end, self._left = hosts, end, False
        own = hosts.credentials()
        self.ending = Ending(f"rank {hosts.rank} of {hosts.hosts}", self._end_all)
        if hosts.rank == 0:
            self.log: LeaderLog | FollowerLog = LeaderLog(hosts, own, self.ending)
            self.log.join()
        else:
            self.log = FollowerLog(hosts, own, self.ending)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.hosts.rank == 0

    def compare(self, description: Mapping[str, str]) -> None:
        """Check that all ranks have the same options. Raises ConfigError."""
        self.log.compare(description)

    def least(self, mine: int) -> int:
        """The least of all ranks' numbers, of which this is this rank's; every rank must ask for it."""
        return self.log.least(mine)

    def leave(self) -> None:
        """End the group's work: rank 0 informs the followers; then JAX's processes disconnect."""
        self.ending.wait_if_begun()
        if self._left:
            return
        self._left = True
        self.log.finish()
        jax.distributed.shutdown()

    def end_soon(self, reason: str) -> None:
        """End the process, but return first: for callers with errors to pass on."""
        threading.Thread(target=self.ending, args=(reason[:500],), daemon=True).start()

    def _end_all(self, status: int) -> None:
        """Send the error to the other ranks, if they still listen."""
        with contextlib.suppress(Exception):
            self.log.close("it could not go on; its own log says more")
        self._end(status)

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave; after an error end the process, as JAX would wait for the other ranks first."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.leave()
            return
        status, reason = STATUS, f"{type(error).__name__}: {error}"
        if isinstance(error, MtpJaxError):
            status = _REFUSED_STATUS
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            status = _INTERRUPTED_STATUS
        else:
            traceback.print_exception(kind, error, trace)
        with contextlib.suppress(Exception):
            self.log.close(reason[:500])
        self._end(status)


def lead(runner: LocalRunner, group: Group | None) -> Runner:
    """The runner of the whole group, around the runner of rank 0's devices; without a group, that runner."""
    if group is None:
        return runner
    if not isinstance(group.log, LeaderLog):
        raise ConfigError(f"rank {group.hosts.rank} cannot lead; rank 0 does")
    return LeaderRunner(runner, group.log, group.ending)


def join(hosts: Hosts, end: Callable[[int], object] = os._exit) -> Group:
    """Connect with the other ranks: first the launch log, which requires a secret, then JAX.

    Must be called before JAX knows its devices, and once in a process. Raises ConfigError. end: ends the
    process.
    """
    if hosts.hosts == 1:
        raise ConfigError("hosts = 1: there is nobody to join; leave hosts out, or give 2 or more")
    config: Any = jax.config
    config.update("jax_cpu_collectives_implementation", "gloo")  # used by CPU devices alone
    group = Group(hosts, end)
    with group.ending.on_error("JAX's processes did not come together"):
        jax.distributed.initialize(
            hosts.coordinator,
            hosts.hosts,
            hosts.rank,
            cluster_detection_method="deactivate",  # under Slurm JAX would else take one device per process
            initialization_timeout=max(1, int(hosts.join_seconds)),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            # Without it, JAX listens on all addresses.
            coordinator_bind_address=hosts.coordinator if hosts.rank == 0 else None,
        )
    return group
