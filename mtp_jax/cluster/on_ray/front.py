"""Checks of a request at the ingress, before a replica gets it: its sender, its size, its beginning."""

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax.cluster.on_ray.prefixes import digests
from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.bodies.reading import received
from serve.http.access import Access, Headers, bounded
from serve.http.in_process import SentRequest
from serve.routes.table import ROUTES


class Front:
    """Checks a request by the server's rules on arrival. The replica checks it again."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._access = settings, Access(settings)

    async def call(self, request: Request) -> SentRequest:
        """The request as it travels to a replica. Raises ApiError.

        A client without the right to ask is refused before a byte of its body is read.
        """
        scope, headers = request.scope, Headers(request.scope["headers"])
        body = b""
        if not self._asks_leave(scope["method"], headers):
            refused = self._access.refusal(scope["method"], ROUTES.find(scope["path"]), headers)
            if refused is not None:
                raise refused
            whole = Request(scope, bounded(request.receive, self._settings))
            body = await received(self._settings, whole)
        return SentRequest(
            scope["method"],
            scope["path"],
            list(scope["headers"]),
            body,
            scope["query_string"],
            scope.get("client"),
            digests(body),
        )

    def refused(self, request: Request, error: ApiError) -> Response:
        """The response to a request that no replica answers. Web pages of allowed origins may read it."""
        response = error.response(request.scope["path"])
        origin = request.headers.get("origin")
        if origin is not None and self._settings.allows_origin(origin.lower()):
            response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})
        return response

    def _asks_leave(self, method: str, headers: Headers) -> bool:
        """Whether a request is a browser's preflight (CORS), which has neither key nor body."""
        asks = (
            method == "OPTIONS" and headers.get(b"origin") and headers.get(b"access-control-request-method")
        )
        return bool(asks and self._settings.allowed_origins)
