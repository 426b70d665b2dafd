"""One secret: two processes prove to each other that they know it, and sign every message from then on.

    both sides           purpose, and a byte that says whether this side encrypts
    if both do           the handshake of TLS 1.3, the listener as its server; all that follows is encrypted
    listener -> caller   nonce a
    caller -> listener   nonce b, claim, HMAC(secret, "caller", purpose, a, b, claim, certificate)
    listener -> caller   TAKEN, HMAC(secret, "listener", ...); or a byte that says why not

The purpose is a line that names the protocol and its version, the claim the caller's description of itself,
of a size that the protocol knows. So both sides read a fixed number of bytes before they know who is there.
Both derive a key for each direction from the same values and the secret, and sign every message that follows
(``Seals``): an attacker between the two can end the connection, but cannot change, repeat or leave out a
message.

The certificate is the digest of the listener's, as each side knows it (RFC 5929, tls-server-end-point): with
another certificate, of an attacker between the two, no proof is right. So the secret protects the encryption
without any authority of certificates. Nothing is encrypted unless both sides ask for it.
"""

import hmac
import secrets
from collections.abc import Callable

from mtp_jax.wire.connection import Connection, WireError
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.session import TlsSession
from mtp_jax.wire.signed import MessageTags, Seals

_NONCE = _PROOF = 32  # bytes
_PLAIN, _ENCRYPTED = b"\0", b"\1"
_TAKEN, _OTHER_SECRET, _NOT_TAKEN = b"\1", b"\2", b"\3"


def welcome(
    connection: Connection,
    own: Credentials,
    purpose: bytes,
    size: int,
    take: Callable[[bytes], None] = lambda claim: None,
) -> tuple[bytes, Seals]:
    """Be the listener. Returns the claim of a caller that knows the secret, and the seals. Raises WireError.

    size: bytes of the claim. take: is called with the claim before this side proves itself; raises WireError
    if the claim does not fit.
    """
    certificate = _begin(connection, own, purpose, listens=True)
    secret, mine = own.secret, secrets.token_bytes(_NONCE)
    connection.write(mine)
    answer = bytes(connection.read(_NONCE + size + _PROOF))
    theirs, claim, proof = answer[:_NONCE], answer[_NONCE:-_PROOF], answer[-_PROOF:]
    about = _joined(purpose, mine, theirs, claim, certificate)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", about)):
        connection.write(_OTHER_SECRET)
        raise WireError("secret", "it does not know the secret", claim)
    try:
        take(claim)
    except WireError:
        connection.write(_NOT_TAKEN)
        raise
    connection.write(_TAKEN + _proof(secret, b"listener", about))
    caller, listener = _directions(secret, about)
    return claim, Seals(sent=listener, received=caller)


def greet(connection: Connection, own: Credentials, purpose: bytes, claim: bytes) -> Seals:
    """Be the caller. Returns the seals. Raises WireError."""
    certificate, secret = _begin(connection, own, purpose, listens=False), own.secret
    theirs, mine = bytes(connection.read(_NONCE)), secrets.token_bytes(_NONCE)
    about = _joined(purpose, theirs, mine, claim, certificate)
    connection.write(mine + claim + _proof(secret, b"caller", about))
    verdict = bytes(connection.read(len(_TAKEN)))
    if verdict == _OTHER_SECRET:
        raise WireError("secret", "the other side has another secret")
    if verdict == _NOT_TAKEN:
        raise WireError("config", "the other side knows the secret, but does not take what this side is")
    if not hmac.compare_digest(bytes(connection.read(_PROOF)), _proof(secret, b"listener", about)):
        raise WireError("secret", "the other side does not know the secret")
    caller, listener = _directions(secret, about)
    return Seals(sent=caller, received=listener)


def _begin(connection: Connection, own: Credentials, purpose: bytes, listens: bool) -> bytes:
    """Agree on the purpose and on encryption, and begin it. Returns the certificate's digest; b"": none."""
    tls = own.tls
    connection.write(purpose + (_ENCRYPTED if tls else _PLAIN))
    _expect(connection, purpose)
    theirs = bytes(connection.read(len(_PLAIN)))
    if theirs != (_ENCRYPTED if tls else _PLAIN):
        does, does_not = ("this side", "the other") if tls else ("the other side", "this one")
        raise WireError(
            "tls", f"{does} encrypts, {does_not} does not: give --tls-cert to both, or to neither"
        )
    if tls is None:
        return b""
    connection.start_tls(session := TlsSession(tls, listens))
    return session.certificate()


def _directions(secret: bytes, about: bytes) -> tuple[MessageTags, MessageTags]:
    """The tags of the caller's messages, and of the listener's."""
    return MessageTags(_proof(secret, b"from caller", about)), MessageTags(
        _proof(secret, b"from listener", about)
    )


def _expect(connection: Connection, purpose: bytes) -> None:
    """Read the purpose. Raises WireError at the first byte that is another."""
    for byte in purpose:
        if connection.read(1)[0] != byte:
            raise WireError("protocol", f"it does not speak {purpose.decode().strip()!r}")


def _joined(*parts: bytes) -> bytes:
    return b"\0".join(parts)


def _proof(secret: bytes, who: bytes, about: bytes) -> bytes:
    return hmac.digest(secret, _joined(who, about), "sha256")
