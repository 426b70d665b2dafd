"""The means by which processes of one deployment know each other."""

from dataclasses import dataclass

from mtp_jax.wire.tls import Tls


@dataclass(frozen=True)
class Credentials:
    """The secret of a group, and the means to encrypt its connections, if they are.

    Attributes:
        secret: known to all processes of the group, and to no other.
        tls: None: connections are not encrypted.
    """

    secret: bytes
    tls: Tls | None = None
