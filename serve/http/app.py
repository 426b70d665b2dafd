"""The ASGI application: its routes."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_jax import AsyncLLM, MtpJaxError
from serve.base.errors import ApiError, respond
from serve.base.settings import Settings
from serve.base.state import Server
from serve.http.security import AccessControl
from serve.routes import (
    admin,
    chat,
    completions,
    engine_info,
    info,
    messages,
    native,
    openapi,
    page,
    responses,
)
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.metrics import Metrics

_Handler = Callable[[Server, Request], Awaitable[Response]]
_GET: dict[str, _Handler] = {
    "/health": info.health,
    "/ping": info.health,
    "/load": info.load,
    "/tokenizer_info": info.tokenizer_info,
    "/ready": info.ready,
    "/openapi.json": openapi.openapi,
    "/version": info.version,
    "/metrics": info.metrics,
    **dict.fromkeys(("/server_info", "/get_server_info"), engine_info.server_info),
    **dict.fromkeys(("/model_info", "/get_model_info"), engine_info.model_info),
    "/health_generate": engine_info.health_generate,
    "/get_weight_version": admin.weight_version,
    # SGLang's trainers send these by either method.
    "/flush_cache": info.flush_cache,
    "/release_memory_occupation": admin.release_memory,
    "/resume_memory_occupation": admin.resume_memory,
    "/v1/models": info.models,
    "/v1/models/{name:path}": info.model,
    **dict.fromkeys(page.PATHS, page.page),
}
_POST: dict[str, _Handler] = {
    "/v1/completions": completions.completions,
    "/v1/chat/completions": chat.chat_completions,
    "/v1/responses": responses.responses,
    "/v1/messages": messages.messages,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/tokenize": info.tokenize,
    "/detokenize": info.detokenize,
    "/generate": native.generate,
    "/flush_cache": info.flush_cache,
    "/reset_prefix_cache": info.flush_cache,
    "/abort_request": admin.abort_request,
    "/update_weight_version": admin.update_weight_version,
    "/pause_generation": admin.pause,
    "/continue_generation": admin.unpause,
    "/update_weights_from_disk": admin.update_weights,
    "/release_memory_occupation": admin.release_memory,
    "/resume_memory_occupation": admin.resume_memory,
    "/hidden_states": admin.hidden_states,
}


def make_app(allm: AsyncLLM, settings: Settings, alarm: AcceptanceAlarm | None = None) -> ASGIApp:
    """The application in front of an engine, which the caller starts and closes.

    alarm: the acceptance alarm, which ``/metrics`` shows; None: there is none.
    """
    alarm = alarm or AcceptanceAlarm(floor=0, ceiling=1)
    server = Server(allm, settings, Metrics(allm, settings.model_name, alarm))

    routes = [
        Route(path, partial(handler, server), methods=[method])
        for method, handlers in (("GET", _GET), ("POST", _POST))
        for path, handler in handlers.items()
    ]
    errors: dict[Any, Any] = dict.fromkeys(
        (ApiError, ValidationError, MtpJaxError, HTTPException, Exception), respond
    )
    app = Starlette(routes=routes, exception_handlers=errors)
    app.router.redirect_slashes = False
    controlled: ASGIApp = AccessControl(app, server, frozenset((*_GET, *_POST)))
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
