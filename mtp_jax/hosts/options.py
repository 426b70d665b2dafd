"""The rank of this process in a group, and the group's address. No jax here: the command line reads it."""

from dataclasses import dataclass
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.options import check, documented, option
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.secret import read_secret
from mtp_jax.wire.tls import TlsFiles

_MOST_PORT = 65535


@documented
@dataclass(frozen=True)
class Hosts(TlsFiles):
    """One engine over several processes, as a rule one per host. Raises ConfigError.

    The launch log's port is the coordinator's plus 1, so one address is enough to start a group; a firewall
    must let this port and JAX's through.
    """

    hosts: int = option(
        1, "processes of one engine, each with devices of its own", low=1, high=1024, metavar="N"
    )
    rank: int = option(
        0, "which of them this is; 0 leads and serves, the rest follow", low=0, high=1023, metavar="I"
    )
    coordinator: str | None = option(
        None,
        "address of rank 0, the same for all, in a network of the group's own",
        kind=str,
        unset="none",
        metavar="HOST:PORT",
    )
    log_port: int | None = option(
        None,
        "port of the launch log on the coordinator's host",
        kind=int,
        low=1,
        high=_MOST_PORT,
        unset="the one after the coordinator's",
        metavar="PORT",
    )
    secret_file: str | Path | None = option(
        None,
        "file with the secret that the ranks of a group share, or the servers that hand over pages; readable "
        "by you alone",
        kind=Path,
        unset="MTP_JAX_SECRET of the environment",
        metavar="FILE",
    )
    join_seconds: float = option(
        300.0,
        "seconds for all ranks to come together at the start",
        low=0,
        above=True,
        high=86400,
        metavar="S",
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        self.check_tls()
        if self.rank >= self.hosts:
            raise ConfigError(
                f"rank = {self.rank} of hosts = {self.hosts}; ranks go from 0 to {self.hosts - 1}: give "
                "the number of processes as hosts"
            )
        if self.hosts > 1:
            self._ports()

    def credentials(self) -> Credentials:
        """The secret of the group, and its encryption. Raises ConfigError for files that do not serve."""
        return Credentials(read_secret(self.secret_file, f"hosts = {self.hosts}"), self.peering())

    def describe(self) -> str:
        """The group in a line of the log."""
        host, port = self.address
        plain = ", NOT ENCRYPTED (--tls-cert)" if self.is_plain(host) else ""
        return f"{self.hosts}, which meet at {host}:{port}{plain}; JAX's own traffic is not encrypted"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the launch log."""
        host, _, after = self._ports()
        return host, after

    def _ports(self) -> tuple[str, int, int]:
        host, _, port = (self.coordinator or "").rpartition(":")
        number = int(port) if port.isdecimal() else 0
        if not host or not 1 <= number <= _MOST_PORT:
            raise ConfigError(
                f"coordinator = {self.coordinator!r}; expected HOST:PORT of rank 0, the same on every host, "
                "such as 10.0.0.1:9000"
            )
        after = self.log_port or number + 1
        if after == number or after > _MOST_PORT:
            raise ConfigError(
                f"the launch log cannot have port {after} beside the coordinator's {number}; give another "
                "log_port"
            )
        return host.strip("[]"), number, after
