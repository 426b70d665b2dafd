"""A route as data: all that the server knows of a path stands in its line of the table (``table.py``)."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from serve.base.state import Server
from serve.bodies.fields import Body

Handler = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """A path, its handler, and the rules for requests to it.

    Attributes:
        path: the path; ``{name:path}`` at its end stands for any text.
        methods: "GET", "POST", or both, as SGLang's trainers send either.
        bodies: bodies that it takes, as ``reading.read`` chooses between them.
        access: the right that a request needs. "open": none, a probe is never refused; "page": no key to
            read, as the page is where the key is entered; "metrics": no key to read where the operator says
            so; "key": a key; "admin": the admin key.
        queued: whether a full queue refuses it unread.
        quiet: whether answers without an error leave no line in the access log, as monitors and the page ask
            every few seconds.
    """

    path: str
    methods: Sequence[str]
    handler: Handler
    bodies: Sequence[type[Body]] = ()
    access: Literal["open", "page", "metrics", "key", "admin"] = "key"
    queued: bool = False
    quiet: bool = False

    @property
    def changed_by_get(self) -> bool:
        """Whether a GET without an admin key changes something. Browsers send no Origin with it."""
        return self.access != "admin" and {"GET", "POST"} <= {*self.methods}


class Routes:
    """Routes, each of which must have a path of its own. Raises ValueError for two of one path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = {route.path: route for route in routes}
        if len(self._routes) < len(routes):
            raise ValueError("two routes have one path")
        self._named = [(route.path.partition("{")[0], route) for route in routes if "{" in route.path]

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def find(self, path: str) -> Route | None:
        """The route of a path, under any method; None if it has none."""
        named = (route for start, route in self._named if path.startswith(start))
        return self._routes.get(path) or next(named, None)
