"""Options of an operator for prefill apart from decode. No jax here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mtp_jax.errors import ConfigError
from mtp_jax.hosts.options import Hosts
from mtp_jax.options import check, documented, narrowed, option
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.secret import read_secret
from mtp_jax.wire.tls import TlsFiles

Role = Literal["both", "prefill", "decode"]


@documented
@dataclass(frozen=True)
class HandoverOptions(TlsFiles):
    """Options of a server that hands over pages of prompts, or takes them. Raises ConfigError."""

    role: Role = option(
        "both",
        "prefill: send the pages of prompts to servers that ask; decode: ask servers for them; both: "
        "neither, serve alone",
        choices=get_args(Role),
    )
    peers: tuple[str, ...] = option(
        (),
        "the servers that prefill: their peer_address",
        kind=object,
        metavar="HOST:PORT,...",
    )
    peer_address: str = option(
        "127.0.0.1:8100", "where a server that prefills listens for peers", metavar="HOST:PORT"
    )
    secret_file: str | Path | None = narrowed(Hosts, "secret_file", None)
    peer_seconds: float = option(
        10.0,
        "most that one prompt is waited for; pages that have not come by then are computed",
        low=0,
        high=600,
        above=True,
        metavar="S",
    )

    @property
    def apart(self) -> bool:
        """Whether it prefills or decodes alone."""
        return self.role != "both"

    def credentials(self) -> Credentials:
        """The secret of both sides, and their encryption. Raises ConfigError for files that do not serve."""
        return Credentials(read_secret(self.secret_file, f"role = {self.role!r}"), self.peering())

    def __post_init__(self) -> None:
        check(self, ConfigError)
        self.check_tls()
        for where in (*self.peers, self.peer_address):
            address(where)
        if not self.apart:
            if self.peers or self.secret_file is not None or self.tls_cert is not None:
                raise ConfigError(
                    "peers, secret_file and tls_cert are of a role; give role = 'prefill' or 'decode'"
                )
            return
        if (self.role == "decode") != bool(self.peers):
            raise ConfigError(
                f"role = {self.role!r} with {len(self.peers)} peers; 'decode' takes one or more, 'prefill' "
                "none"
            )


def address(where: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ConfigError for another form."""
    host, _, port = where.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not int(port) < 2**16:
        raise ConfigError(f"{where!r:.80} is no address of a peer; expected HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
