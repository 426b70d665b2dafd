"""The ASGI application: the routes of the table behind access control."""

from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_jax import AsyncLLM, MtpJaxError
from serve.base.errors import ApiError, respond
from serve.base.settings import Settings
from serve.base.state import Server
from serve.http.security import AccessControl
from serve.routes.route import Routes
from serve.routes.table import ROUTES
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.metrics import Metrics
from serve.watch.traces import Traces


def make_app(
    allm: AsyncLLM, settings: Settings, alarm: AcceptanceAlarm | None = None, routes: Routes = ROUTES
) -> ASGIApp:
    """The application in front of an engine, which the caller starts and closes.

    alarm: the acceptance alarm, which ``/metrics`` shows; None: there is none.
    """
    alarm = alarm or AcceptanceAlarm(floor=0, ceiling=1)
    traces = None
    if settings.otlp_traces_endpoint is not None:
        traces = Traces(settings.otlp_traces_endpoint, settings.model_name)
        allm.hooks.at_close.append(traces.close)
    server = Server(allm, settings, Metrics(allm, settings.model_name, alarm), traces)

    errors: dict[Any, Any] = dict.fromkeys(
        (ApiError, ValidationError, MtpJaxError, HTTPException, Exception), respond
    )
    served = [routing.Route(r.path, partial(r.handler, server), methods=[*r.methods]) for r in routes]
    app = Starlette(routes=served, exception_handlers=errors)
    app.router.redirect_slashes = False
    app.state.routes = routes
    controlled: ASGIApp = AccessControl(app, server, routes)
    if mark := allm.about.mark:
        controlled = _marked(controlled, mark)
    if not settings.allowed_origins:
        return controlled
    # CORS comes before the access control, as a browser's preflight has no key.
    return CORSMiddleware(
        controlled,
        allow_origins=[origin.lower() for origin in settings.allowed_origins],
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "warning", "retry-after", "x-simulated", "x-synthetic"),
    )


def _marked(app: ASGIApp, mark: str) -> ASGIApp:
    """The application with a header in each answer that says that it is not the model's own."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (f"x-{mark.lower()}".encode(), mark.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_marked)

    return marked
