"""Access control before every route: rights, limits, and the log line of each request."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.base.errors import ApiError, as_api_error
from serve.base.ids import new_id
from serve.base.sse import abort_streams
from serve.base.state import Server
from serve.http.access import METRICS_PATH, OPEN_PATHS, Access, Headers, bounded
from serve.routes.page import PATHS as PAGE_PATHS
from serve.watch.access_log import log_request, record_of

# Paths that monitors ask every few seconds, as the page does while programs compile; and files of the page.
_ASKED_OFTEN = (*OPEN_PATHS, "/health_generate", METRICS_PATH, "/server_info", *PAGE_PATHS)
_FIRST_ERROR = 400  # status of HTTP
# Paths that a full queue refuses unread.
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
_SHOWN_BYTES = 128  # of a request's name that is not safe to use


class AccessControl:
    """ASGI middleware. A request that it refuses reaches no route."""

    def __init__(self, app: ASGIApp, server: Server, routes: frozenset[str]) -> None:
        self._app, self._server, self._routes = app, server, routes
        self._settings, self._access = server.settings, Access(server.settings)
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and serve a request."""
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
                scope.setdefault("state", {})["administers"] = self._access.administers(headers)
                await self._app(scope, bounded(receive, self._settings), answer)
        finally:
            abort_streams(scope)  # also after an error before the streams were read
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

    def _refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """The error that refuses a request; None if it may reach its route."""
        if path in OPEN_PATHS and method in ("GET", "HEAD"):
            return None
        if (refused := self._access.refusal(method, path, headers)) is not None:
            return refused
        if self._connections > self._settings.max_connections:
            limit = self._settings.max_connections
            return ApiError(
                503, f"{limit} requests are in progress already", None, "overloaded", {"Retry-After": "1"}
            )
        if method == "POST" and path in _QUEUED and (full := self._server.allm.admission.overloaded()):
            return as_api_error(full)  # before the body is read and parsed
        return None
