"""Certificates: the options that name their files, and contexts of Python's ``ssl`` made of them."""

import hashlib
import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.options import option

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Options of a process whose connections may be encrypted."""

    tls_cert: str | Path | None = option(
        None,
        "PEM file of this process's certificate and its chain: the server speaks https, and all connections "
        "to other hosts of the engine and to peers are encrypted",
        kind=Path,
        metavar="FILE",
        unset="nothing is encrypted",
        subject="access",
    )
    tls_key: str | Path | None = option(
        None,
        "PEM file of that certificate's key",
        kind=Path,
        metavar="FILE",
        unset="in the file of tls_cert",
        subject="access",
    )
    tls_ca: str | Path | None = option(
        None,
        "PEM file of authorities: clients, hosts and peers must show a certificate of one of them",
        kind=Path,
        metavar="FILE",
        unset="none is asked for one",
        subject="access",
    )

    def check_tls(self) -> None:
        """Raise ConfigError for a key or authorities without a certificate."""
        for name in ("tls_key", "tls_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise ConfigError(f"{name} = {getattr(self, name)} without tls_cert; give both")

    def is_plain(self, *hosts: str) -> bool:
        """Whether connections to these hosts would cross a network without encryption."""
        return self.tls_cert is None and not all(map(is_loopback, hosts))

    def context(self, side: int) -> ssl.SSLContext:
        """The context of encrypted connections, TLS 1.2 or newer; ``tls_cert`` must be given.

        Raises ConfigError for files that cannot be read, or are no certificate and key. side:
        ``ssl.PROTOCOL_TLS_SERVER`` or ``ssl.PROTOCOL_TLS_CLIENT``. No name in a certificate is compared with
        a host's.
        """
        assert self.tls_cert is not None
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        named = f"--tls-cert {self.tls_cert}"
        named += f" and --tls-key {self.tls_key}" if self.tls_key is not None else ""
        try:
            # An empty password, as none can be asked for: a key that needs one is an error.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            if self.tls_ca is not None:
                named = f"--tls-ca {self.tls_ca}"
                context.load_verify_locations(self.tls_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # SSLError is an OSError
            reason = getattr(error, "strerror", None) or str(error) or "no such key"
            raise ConfigError(
                f"{named}: {reason}; expected PEM files of a certificate, of its key without a password "
                "(--tls-key, or in the same file), and of authorities"
            ) from error
        return context

    def peering(self) -> "Tls | None":
        """The means to encrypt connections between processes of one secret; None: they are not encrypted."""
        if self.tls_cert is None:
            return None
        listening, calling = self.context(ssl.PROTOCOL_TLS_SERVER), self.context(ssl.PROTOCOL_TLS_CLIENT)
        for each in (listening, calling):
            each.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
        listening.num_tickets = 0  # no connection is resumed
        # The context has read the file: its first certificate is this process's own.
        own = _CERTIFICATE.search(Path(self.tls_cert).read_text(encoding="ascii", errors="replace"))
        if own is None:
            raise ConfigError(f"--tls-cert {self.tls_cert} does not contain '-----BEGIN CERTIFICATE-----'")
        return Tls(listening, calling, digest(ssl.PEM_cert_to_DER_cert(own[0])))


@dataclass(frozen=True)
class Tls:
    """The means to encrypt connections between processes of one secret.

    Attributes:
        listening: context of the side that listens.
        calling: context of the side that calls.
        certificate: digest of this process's own certificate.
    """

    listening: ssl.SSLContext
    calling: ssl.SSLContext
    certificate: bytes


def digest(certificate: bytes) -> bytes:
    """The digest of a certificate in DER, 32 bytes: SHA-256."""
    return hashlib.sha256(certificate).digest()


def is_loopback(host: str) -> bool:
    """Whether an address admits only this computer."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
