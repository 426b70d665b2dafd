"""Messages of two servers once both have proved that they know the secret.

client: Prefill server: Sent, once per page; then End, or at any time Failed
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from mtp_jax.wire.connection import WireError
from mtp_jax.wire.signed import Signed

PURPOSE = b"mtp-jax pages 5\n"
MOST_JSON = 2**16  # bytes of a message
# Words that the other side may give for an early end: they become keys of counters and labels of a metric.
REASONS = frozenset({"late", "lost", "damaged", "protocol", "tls", "secret", "config", "refused", "error"})
_T = TypeVar("_T")


@dataclass(frozen=True)
class Prefill:
    """A request for the pages of a prompt.

    Attributes:
        salt: salt of its digests.
        first: number of pages that the client has.
        seconds: seconds for which the client waits for them.
        ids: the prompt's tokens.
    """

    salt: str
    first: int
    seconds: float
    ids: Int32[np.ndarray, " T"]


@dataclass(frozen=True)
class SentPage:
    """A page.

    Attributes:
        digest: digest of all tokens up to its end, in hexadecimal digits.
        identity: facts that pages depend on besides tokens.
        page: its arrays.
    """

    digest: str
    identity: str
    page: tuple  # arrays, which are compared with the wanted shapes and types


@dataclass(frozen=True)
class Done:
    """There are no further pages."""


@dataclass(frozen=True)
class GaveUp:
    """The hand-over ends early. reason: one of ``REASONS``; any other word counts as "protocol"."""

    reason: str


KINDS: dict[str, type] = {kind.__name__: kind for kind in (Prefill, SentPage, Done, GaveUp)}


def claim(identity: str) -> bytes:
    """A client's claim in the proofs. identity: facts that its pages depend on besides tokens."""
    return sha256(identity.encode()).digest()


def expect(signed: Signed, *kinds: type[_T], most: int = 0) -> _T:
    """Receive a message of one of these kinds, with at most ``most`` bytes of arrays. Raises WireError."""
    message: Any = signed.receive(most)
    if isinstance(message, GaveUp):
        known = message.reason in REASONS
        raise WireError(message.reason if known else "protocol", "" if known else "a reason that is none")
    if not isinstance(message, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise WireError("protocol", f"{type(message).__name__} where {names} was expected")
    return message
