"""Bytes of a request to a checked body."""

import asyncio
import logging
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from mtp_jax import JsonObject
from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.bodies.fields import Body

_Body = TypeVar("_Body", bound=Body)
_LOG = logging.getLogger(__name__)
MOST_NAMED = 10
_LONGEST_NAME = 64
_CLOSE = 0.8  # ratio of difflib from which on an unknown field counts as a misspelt one
# Each takes 4 to 8 us to check, on the event loop, where other requests wait meanwhile: 0.1 s at most.
MAX_OBJECTS = 12_000
_OBJECTS = "messages, parts, calls, tools or fields"
_FIELDS = 16  # number of unknown fields that take as long as one object


async def read(settings: Settings, request: Request, *kinds: type[_Body]) -> _Body:
    """Parse the body as the first of ``kinds`` whose required fields are all there, else as the last.

    Sets ``request.state.model`` to the name of the model for the answer.

    Unknown fields are an error if the server is strict; else ``warning`` names them in the response.

    Raises ApiError, ValidationError.
    """
    data = await received(settings, request)
    if not data:
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    if _objects(value) > MAX_OBJECTS:
        raise ApiError(
            400, f"the body has more than {MAX_OBJECTS:,} {_OBJECTS}; send fewer, or join their texts"
        )
    kind = next((kind for kind in kinds if _required(kind) <= value.keys()), kinds[-1])
    body = kind.model_validate(value)
    model = value.get("model")
    if model is not None and model not in settings.names:
        message = (
            f"the model {model!r} does not exist; this server has {', '.join(map(repr, settings.names))}"
        )
        raise ApiError(404, message, "model", "model_not_found")
    request.state.model = model or settings.model_name
    unknown = [printable(name) for name in islice(body.unknown(), MOST_NAMED)]
    if unknown and settings.strict:
        close = get_close_matches(unknown[0], kind.model_fields, 1, _CLOSE)
        instead = f"do you mean {close[0]}?" if close else "leave it out"
        raise ApiError(400, f"unknown field {unknown[0]}; {instead}", unknown[0], "unknown_field")
    request.state.unknown = []
    for name in unknown:
        ignore(request, name)
    return body


async def received(settings: Settings, request: Request) -> bytes:
    """The bytes of the body. Raises ApiError."""
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {settings.body_seconds:g} s") from None
    except ClientDisconnect:  # this answer is for the log and the metrics alone
        raise ApiError(499, "the client disconnected before its body had arrived") from None


def ignore(request: Request, name: str) -> None:
    """Report, in the log and by ``warning``, that a part of a request has no effect."""
    request.state.unknown.append(name)
    tell(name)


def _objects(value: JsonObject) -> int:
    """The number of objects in nested lists; counting stops soon after ``MAX_OBJECTS``.

    Lists of other or mixed items need no count: they are refused at their first wrong item.
    """
    found, inner = len(value) // _FIELDS, [value]
    while inner and found <= MAX_OBJECTS:
        one = inner.pop()
        for items in one.values():
            if isinstance(items, list) and items and isinstance(items[0], dict):
                found += len(items)
                inner += [item for item in items[: MAX_OBJECTS + 1] if isinstance(item, dict)]
    return found


@lru_cache(maxsize=256)  # clients choose the names
def tell(name: str) -> None:
    """Log, once, that a field has no effect."""
    _LOG.warning("requests have %s, which has no effect here", name)


def warning(request: Request) -> dict[str, str]:
    """A header that names the fields of the request that have no effect."""
    unknown = getattr(request.state, "unknown", [])
    return {"Warning": f'299 mtp-jax "ignored: {", ".join(unknown)}"'} if unknown else {}


def _required(kind: type[Body]) -> set[str]:
    return {name for name, field in kind.model_fields.items() if field.is_required()}


def printable(name: str) -> str:
    """The name of a field, fit for a header."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "?" for c in name[:_LONGEST_NAME])
