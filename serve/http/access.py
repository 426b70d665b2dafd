"""Rules of access by the head of a request alone: keys, hosts, origins, sizes."""

import hmac
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import Message, Receive

from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.routes.route import Route

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Version, trace, the client's span, flags: W3C Trace Context, section 3.2.
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_HEADER_BYTES = 16 * 1024
_READING = ("GET", "HEAD")


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

    def trace(self) -> str | None:
        """The client's place in a trace, W3C's ``traceparent``; None where there is no valid one."""
        given = self.get(b"traceparent")
        return given.decode() if _TRACE.fullmatch(given) else None


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

    def refusal(self, method: str, route: Route | None, headers: Headers) -> ApiError | None:
        """The error that refuses a request by its head; None if it is allowed.

        route: the route of its path; None: it has none, which a client learns that has a key.
        """
        if is_probe(method, route):
            return None
        return (
            self._of_sender(headers)
            or _of_link(route, headers)
            or self._of_key(route, method in _READING, headers)
            or self._of_body(headers)
        )

    def _of_sender(self, headers: Headers) -> ApiError | None:
        """The error of too many headers, of another host, or of a page of another origin."""
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
        return None

    def _of_key(self, route: Route | None, reads: bool, headers: Headers) -> ApiError | None:
        """The error of a request that lacks the key which its route needs."""
        access = "key" if route is None else route.access
        public = reads and (access == "page" or (access == "metrics" and self._settings.open_metrics))
        if self._keys and not public and not _knows(headers, self._keys + self._admin):
            return _no_key("a valid API key")
        if access != "admin":
            return None
        if not self._admin:
            return ApiError(403, "this route needs an admin key; start the server with --admin-key")
        return None if _knows(headers, self._admin) else _no_key("the admin key")

    def _of_body(self, headers: Headers) -> ApiError | None:
        """The error of a body that the server does not read, by its headers."""
        if headers.get(b"content-encoding").lower() not in (b"", b"identity"):
            return ApiError(415, "compressed bodies are not accepted; send it as it is")
        length = headers.get(b"content-length")
        if length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            return _too_large(self._settings)
        return None


def _of_link(route: Route | None, headers: Headers) -> ApiError | None:
    """The error of a page of another origin that links to a route by which a GET changes something."""
    linked = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    if route is not None and route.changed_by_get and linked:
        return ApiError(403, "links and images in pages of other origins may not do this")
    return None


def is_probe(method: str, route: Route | None) -> bool:
    """Whether a request is a probe, which needs no right at all."""
    return route is not None and route.access == "open" and method in _READING


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
