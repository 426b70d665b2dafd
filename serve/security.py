"""Access control before every route: keys, hosts, origins, sizes, and how much at a time."""

import hmac
import re
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.access_log import log_request, record_of
from serve.admin import PATHS as ADMIN_PATHS
from serve.errors import ApiError, as_api_error
from serve.ids import new_id
from serve.page import PATHS as PAGE_PATHS
from serve.sse import abort_streams
from serve.state import Server

# For probes, which have no key.
_OPEN_PATHS = ("/health", "/ping", "/ready")
# By monitors every few seconds, and a dozen at a time for the page.
_ASKED_OFTEN = (*_OPEN_PATHS, "/metrics", *PAGE_PATHS)
_FIRST_ERROR = 400  # status of HTTP
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# What a full queue refuses unread.
_QUEUED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/tokenize",
    "/detokenize",
)
_MOST_HEADER_BYTES = 16 * 1024
_SHOWN_BYTES = 128  # of a request's name that is not safe to use


class AccessControl:
    """ASGI middleware. What it refuses reaches no route. Probes are open, the page needs no key."""

    def __init__(self, app: ASGIApp, server: Server, routes: frozenset[str]) -> None:
        self._app, self._server, self._routes = app, server, routes
        self._settings = server.settings
        self._keys = [key.encode() for key in self._settings.api_keys]
        self._admin = [key.encode() for key in (self._settings.admin_key,) if key is not None]
        self._hosts = self._settings.hosts
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            return
        headers = Headers(scope["headers"])
        given = headers.get(b"x-request-id")
        name = (headers.name() or new_id()).encode()
        started, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-request-id", name), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        self._connections += 1
        try:
            error = self._refusal(scope["method"], scope["path"], headers)
            if error is not None:
                record_of(scope).error = error.message
                await error.response(scope["path"])(scope, receive, answer)
            else:
                await self._app(scope, self._limited(receive), answer)
        finally:
            abort_streams(scope)  # whatever was raised before they were read
            self._connections -= 1
            self._server.metrics.responded(self._route(scope["path"]), status)
            shown = name if given in (b"", name) else given[:_SHOWN_BYTES]
            quiet = scope["path"] in _ASKED_OFTEN and status < _FIRST_ERROR
            log_request(scope, shown, status, time.perf_counter() - started, quiet)

    def _route(self, path: str) -> str:
        """The route of a path, as metrics name it."""
        if path in self._routes:
            return path
        with_name = (r for r in self._routes if "{" in r)
        return next((r for r in with_name if path.startswith(r.partition("{")[0])), "other")

    def _refusal(self, method: str, path: str, headers: "Headers") -> ApiError | None:
        """Why a request reaches no route; None if it does."""
        reads = method in ("GET", "HEAD")
        if path in _OPEN_PATHS and reads:
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
        public = reads and path in PAGE_PATHS  # where the key is entered
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
            return self._too_large()
        if self._connections > self._settings.max_connections:
            limit = self._settings.max_connections
            return ApiError(
                503, f"{limit} requests are in progress already", None, "overloaded", {"Retry-After": "1"}
            )
        if method == "POST" and path in _QUEUED and (full := self._server.allm.admission.overloaded()):
            return as_api_error(full)  # before the body is read and parsed
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Counts the body as it comes: its length may be unknown, or a lie."""
        got = 0

        async def limited() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._settings.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is too large; at most {self._settings.max_body_bytes} bytes are allowed"
        )


def _knows(headers: "Headers", keys: Sequence[bytes]) -> bool:
    """In constant time for every key: no stopping at the first that fits."""
    scheme, _, key = headers.get(b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key")  # where Anthropic's clients send it
    found = [hmac.compare_digest(key.strip(), own) for own in keys]
    return any(found)


def _no_key(needed: str) -> ApiError:
    hint = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, f"{needed} is needed: Authorization: Bearer KEY", None, "invalid_api_key", hint)


class Headers:
    """The first value of every header, and the bytes of all."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values = {name.lower(): value for name, value in reversed(pairs)}
        self.size = sum(len(name) + len(value) for name, value in pairs)

    def get(self, name: bytes) -> bytes:
        """The value of a header by its name in small letters; empty if there is none."""
        return self._values.get(name, b"")

    def name(self) -> str | None:
        """What the client calls the request, if that is safe to return and to log."""
        given = self.get(b"x-request-id")
        return given.decode() if _PLAIN_ID.fullmatch(given) else None


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header; None for "null" and nonsense."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
