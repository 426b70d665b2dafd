"""OpenAI's error objects: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import (
    EngineStopped,
    JsonMapping,
    JsonObject,
    MtpJaxError,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from serve.base.json_answer import JsonAnswer
from serve.watch.access_log import record_of

_LOG = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 60
_MOST_CHARACTERS = 2000  # of a message
_TOO_LONG = "context_length_exceeded"
_ROUTES = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /metrics"
# Replacements for pydantic's messages that speak of Python or of its own classes.
_WORDS: dict[str, str] = {
    **dict.fromkeys(("dict_type", "model_type"), "Input should be an object"),
    "missing": "this field is required; add it",
}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
}

_ANTHROPIC_KINDS = {413: "request_too_large", 503: "overloaded_error", 500: "api_error"}


@dataclass
class ApiError(Exception):
    """An error that becomes the answer to a request.

    Attributes:
        status: the HTTP status.
        message: text for the client: no internals.
        param: the field of the request at fault.
        code: a word that identifies the error to programs.
        headers: headers to add to the response.
        details: data for programs, in Anthropic's shape alone.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    details: JsonMapping | None = None

    def __post_init__(self) -> None:
        if len(self.message) > _MOST_CHARACTERS:  # it quotes a part of the body that nobody has shortened
            half = _MOST_CHARACTERS // 2
            self.message = f"{self.message[:half]}...{self.message[-half:]}"

    @property
    def body(self) -> JsonObject:
        """The JSON object of the error, in OpenAI's shape."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> JsonObject:
        """The JSON object of the error, in Anthropic's shape."""
        kind = _ANTHROPIC_KINDS.get(self.status, self.body["error"]["type"])
        details = {"details": self.details} if self.details else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def response(self, path: str) -> Response:
        """The HTTP response of a route."""
        body = self.anthropic if path.startswith("/v1/messages") else self.body
        return JsonAnswer(body, self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception; an exception that the client did not cause is logged, and its text hidden."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _of_validation(error)
        case Overloaded():
            return ApiError(503, str(error), code="overloaded", headers=_retry(error.retry_after))
        case EngineStopped():
            # A retry on this connection would reach this server again, although other servers have the model.
            return ApiError(503, str(error), code="unavailable", headers=_retry(1) | {"Connection": "close"})
        case PromptTooLong():
            # OpenAI's package prints the message alone, in which langchain looks for the code.
            return ApiError(400, f"{error} ({_TOO_LONG})", code=_TOO_LONG)
        case RequestError():
            return ApiError(400, str(error))
        case MtpJaxError():
            _LOG.error("%s", error)
        case _:
            _LOG.error("unexpected", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal")


async def respond(request: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    if isinstance(error, HTTPException):
        error = _of_routing(request, error)
    answer = as_api_error(error)
    record_of(request.scope).error = answer.message
    return answer.response(request.url.path)


def _retry(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(math.ceil(seconds))}


def _of_routing(request: Request, error: HTTPException) -> ApiError:
    """The error for an unknown path, or for a method that the path does not allow."""
    path = request.url.path[:_SHOWN_CHARACTERS]
    if error.status_code == 404:
        close = get_close_matches(path, [route.path for route in request.app.routes], 1)
        message = f"there is no {path} here; "
        message += f"do you mean {close[0]}?" if close else f"try {_ROUTES}, or /openapi.json, which has all"
    else:
        message = f"{path} takes {(error.headers or {}).get('Allow')}, not {request.method}"
    return ApiError(error.status_code, message, headers=error.headers)


def _begun(value: object) -> object:
    """The beginning of a value, which may be a whole body, for an error."""
    match value:
        case str():
            return value[:_SHOWN_CHARACTERS]
        case list():
            return [*map(_begun, value[:_SHOWN_CHARACTERS])]
        case dict():
            return {k[:_SHOWN_CHARACTERS]: _begun(v) for k, v in islice(value.items(), _SHOWN_CHARACTERS)}
        case _:
            return value


def _of_validation(error: ValidationError) -> ApiError:
    """The error for the first fault of a body: its place, the expected value, the value got."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"] if " " not in str(part)]
    got = ""
    if first["type"] not in ("missing", "value_error"):
        text = to_json(_begun(first["input"]), fallback=lambda _: "?", inf_nan_mode="constants").decode(
            errors="replace"
        )
        got = f"; got {text[:_SHOWN_CHARACTERS]}{'...' if len(text) > _SHOWN_CHARACTERS else ''}"
    message = _WORDS.get(first["type"], first["msg"].removeprefix("Value error, "))
    where = ".".join(path)[:_SHOWN_CHARACTERS]
    if not path:  # a rule about several fields names the field to change
        return ApiError(400, message, param=message.partition(":")[0].partition(".")[0])
    return ApiError(400, f"{where}: {message}{got}", param=path[0])
