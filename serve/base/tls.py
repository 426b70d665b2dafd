"""Encryption of the server's own port, by Python's ``ssl``."""

import ssl

from serve.base.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The context of connections to the server; None where they are not encrypted.

    Raises ConfigError for files that cannot be read, or are no certificate and key.
    """
    return None if settings.tls_cert is None else settings.context(ssl.PROTOCOL_TLS_SERVER)
