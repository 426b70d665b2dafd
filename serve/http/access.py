"""Rules of access by the head of a request alone: keys, hosts, origins, sizes."""

import hmac
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import Message, Receive

from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.routes.admin import PATHS as ADMIN_PATHS
from serve.routes.page import PATHS as PAGE_PATHS

# Paths of probes, which send no key.
OPEN_PATHS = ("/health", "/ping", "/ready")
METRICS_PATH = "/metrics"
# Paths without an admin key that change something by GET, for which browsers send no Origin.
CHANGED_BY_GET = ("/flush_cache",)
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MOST_HEADER_BYTES = 16 * 1024


class Headers:
    """The first value of every header, and the total bytes of headers."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values = {name.lower(): value for name, value in reversed(pairs)}
        self.size = sum(len(name) + len(value) for name, value in pairs)

    def get(self, name: bytes) -> bytes:
        """The value of a header by its name in small letters; empty if there is none."""
        return self._values.get(name, b"")

    def name(self) -> str | None:
        """The client's id of the request, if that is safe to return and to log."""
        given = self.get(b"x-request-id")
        return given.decode() if _PLAIN_ID.fullmatch(given) else None


class Access:
    """The rules. Probes are open, the page needs no key, nor do metrics where the operator says so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin = [key.encode() for key in (settings.admin_key,) if key is not None]
        self._hosts = settings.hosts

    def administers(self, headers: Headers) -> bool:
        """Whether a request may end the requests of other clients: it has the admin key, or there is no
        key at all."""
        return not (self._keys or self._admin) or _knows(headers, self._admin)

    def refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """The error that refuses a request by its head; None if it is allowed."""
        reads = method in ("GET", "HEAD")
        if path in OPEN_PATHS and reads:
            return None
        if headers.size > _MOST_HEADER_BYTES:
            return ApiError(
                431, f"the headers have {headers.size} bytes; at most {_MOST_HEADER_BYTES} are allowed"
            )
        host = headers.get(b"host").decode("latin-1").lower()
        if self._hosts and host.rpartition(":")[0] not in self._hosts and host not in self._hosts:
            return ApiError(403, "this server does not answer for that Host; start it with --allowed-host")
        origin = headers.get(b"origin").decode("latin-1").lower()
        if origin and _netloc(origin) != host and not self._settings.allows_origin(origin):
            return ApiError(
                403,
                f"requests from pages of other origins are refused: from {origin[:100]!a}, for the Host "
                f"{host[:100]!a}; a proxy must pass the Host on, or the server allow the origin "
                "(--allowed-origin)",
            )
        # The page is where the key is entered.
        open_too = path == METRICS_PATH and self._settings.open_metrics
        if path in CHANGED_BY_GET and headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            return ApiError(403, "links and images in pages of other origins may not do this")
        public = reads and (path in PAGE_PATHS or open_too)
        if self._keys and not public and not _knows(headers, self._keys + self._admin):
            return _no_key("a valid API key")
        if path in ADMIN_PATHS:
            if not self._admin:
                return ApiError(403, "this route needs an admin key; start the server with --admin-key")
            if not _knows(headers, self._admin):
                return _no_key("the admin key")
        if headers.get(b"content-encoding").lower() not in (b"", b"identity"):
            return ApiError(415, "compressed bodies are not accepted; send it as it is")
        length = headers.get(b"content-length")
        if length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            return _too_large(self._settings)
        return None


def bounded(receive: Receive, settings: Settings) -> Receive:
    """Limit the body by counting its bytes as they come: its stated length may be missing or false."""
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > settings.max_body_bytes:
            raise _too_large(settings)
        return message

    return counted


def _too_large(settings: Settings) -> ApiError:
    return ApiError(413, f"the body is too large; at most {settings.max_body_bytes} bytes are allowed")


def _knows(headers: Headers, keys: Sequence[bytes]) -> bool:
    """Whether a request has one of the keys. It compares all keys, each in constant time."""
    scheme, _, key = headers.get(b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key")  # where Anthropic's clients send it
    found = [hmac.compare_digest(key.strip(), own) for own in keys]
    return any(found)


def _no_key(needed: str) -> ApiError:
    hint = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, f"{needed} is needed: Authorization: Bearer KEY", None, "invalid_api_key", hint)


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header; None for "null" and nonsense."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
