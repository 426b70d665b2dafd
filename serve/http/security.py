"""Access control before every route: rights, limits, and the log line of each request."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.base.errors import ApiError, as_api_error
from serve.base.ids import new_id
from serve.base.sse import abort_streams
from serve.base.state import Server
from serve.http.access import Access, Headers, bounded, is_probe
from serve.routes.route import Route, Routes
from serve.watch.access_log import log_request, record_of

_FIRST_ERROR = 400  # status of HTTP
_SHOWN_BYTES = 128  # of a request's name that is not safe to use


class AccessControl:
    """ASGI middleware. A request that it refuses reaches no route."""

    def __init__(self, app: ASGIApp, server: Server, routes: Routes) -> None:
        self._app, self._server, self._routes = app, server, routes
        self._settings, self._access = server.settings, Access(server.settings)
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and serve a request."""
        if scope["type"] != "http":
            return
        headers, route = Headers(scope["headers"]), self._routes.find(scope["path"])
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
            error = self._refusal(scope["method"], route, headers)
            if error is not None:
                record_of(scope).error = error.message
                await error.response(scope["path"])(scope, receive, answer)
            else:
                scope.setdefault("state", {})["administers"] = self._access.administers(headers)
                await self._app(scope, bounded(receive, self._settings), answer)
        finally:
            abort_streams(scope)  # also after an error before the streams were read
            self._connections -= 1
            self._server.metrics.responded(route.path if route else "other", status)
            shown = name if given in (b"", name) else given[:_SHOWN_BYTES]
            quiet = route is not None and route.quiet and status < _FIRST_ERROR
            seconds = time.perf_counter() - started
            log_request(scope, shown, status, seconds, headers.trace(), quiet=quiet)
            if traces := self._server.traces:
                traces.ended(record_of(scope), name.decode(), status, seconds, headers.trace())

    def _refusal(self, method: str, route: Route | None, headers: Headers) -> ApiError | None:
        """The error that refuses a request; None if it may reach its route."""
        if is_probe(method, route):
            return None
        if (refused := self._access.refusal(method, route, headers)) is not None:
            return refused
        if self._connections > self._settings.max_connections:
            limit = self._settings.max_connections
            return ApiError(
                503, f"{limit} requests are in progress already", None, "overloaded", {"Retry-After": "1"}
            )
        if route is not None and route.queued and method in route.methods:
            full = self._server.allm.admission.overloaded()  # before the body is read and parsed
            return None if full is None else as_api_error(full)
        return None
