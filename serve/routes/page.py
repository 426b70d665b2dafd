"""The chat page: the files of ``serve/web``, which hold no secret and need no key."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from serve.base.state import Server

_FOLDER = Path(__file__).parent.parent / "web"
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page loads nothing from elsewhere, has no inline code, turns no text into code, and is in no frame.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_FILES = {f"/web/{path.name}": path for path in _FOLDER.iterdir() if path.suffix in _TYPES}
_FILES["/"] = _FILES.pop("/web/index.html")
PATHS = frozenset(_FILES)


async def page(server: Server, request: Request) -> Response:
    """The route of every path in ``PATHS``."""
    del server
    path = _FILES[request.scope["path"]]
    return Response(path.read_bytes(), headers=_HEADERS, media_type=_TYPES[path.suffix])
