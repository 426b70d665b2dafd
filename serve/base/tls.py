"""Encryption of the server's own port, by Python's ``ssl``."""

import ssl

from mtp_jax import ConfigError
from serve.base.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The context of connections to the server, TLS 1.2 or newer; None where they are not encrypted.

    Raises ConfigError for files that cannot be read, or are no certificate and key.
    """
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    named = f"--tls-cert {settings.tls_cert}"
    named += f" and --tls-key {settings.tls_key}" if settings.tls_key is not None else ""
    try:
        # An empty password, as none can be asked for: a key that needs one is an error.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        if settings.tls_ca is not None:
            named = f"--tls-ca {settings.tls_ca}"
            context.load_verify_locations(settings.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "strerror", None) or str(error) or "no such key"
        raise ConfigError(
            f"{named}: {reason}; expected PEM files of a certificate, its key without a password, and "
            "authorities"
        ) from error
    return context
