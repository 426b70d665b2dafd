"""Bytes of a request to a checked body."""

import asyncio
import gc
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.bodies.counting import Objects, check_text
from serve.bodies.fields import Body

_Body = TypeVar("_Body", bound=Body)
_LOG = logging.getLogger(__name__)
MOST_NAMED = 10
LONGEST_NAME = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which editors and shells on Windows write before a text
# An escape of half a character: a client has cut a text within an emoji.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][0-9a-fA-F]{3}))"
)
_MOST_HALVES = 4096  # some milliseconds of work
_CLOSE = 0.8  # ratio of difflib from which on an unknown field counts as a misspelt one


async def read(settings: Settings, request: Request, *kinds: type[_Body]) -> _Body:
    """Parse the body as the first of ``kinds`` whose required fields are all there, else as the last.

    Sets ``request.state.model`` to the name of the model for the answer. The body keeps none of its own
    unknown fields, which would stay as long as the answer takes.

    Unknown fields are an error if the server is strict; else ``warning`` names them in the response.

    Raises ApiError, ValidationError.
    """
    data = await received(settings, request)
    if not data:
        raise ApiError(400, "the body is empty; send a JSON object")
    with _no_collection():
        body = _checked(data, kinds)
    kind, model = type(body), getattr(body, "model", None)
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
    (body.model_extra or {}).clear()
    return body


def _checked(data: bytes, kinds: Sequence[type[_Body]]) -> _Body:
    """The body. Raises ApiError, ValidationError."""
    check_text(data)
    try:
        value = _parsed(data.removeprefix(_BYTE_ORDER_MARK))
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    kind = next((kind for kind in kinds if _required(kind) <= value.keys()), kinds[-1])
    return kind.model_validate(value, context=Objects())


def _parsed(data: bytes) -> object:
    """The value of JSON text, in which U+FFFD stands for half a character. Raises ValueError."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        whole, halves = _HALF.subn(_replaced, data, _MOST_HALVES)
        if not halves:
            raise
        return from_json(whole, allow_inf_nan=False)


def _replaced(half: re.Match[bytes]) -> bytes:
    before = half.string[max(0, half.start() - 64) : half.start()]
    is_text = (len(before) - len(before.rstrip(b"\\"))) % 2  # of a backslash and "ud800"
    return half[0] if is_text else rb"\ufffd"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through a body's objects while they are made.

    It would look at all of them each time that there are a quarter more, and find nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


async def received(settings: Settings, request: Request) -> bytes:
    """The bytes of the body. Raises ApiError."""
    try:
        async with asyncio.timeout(settings.body_seconds):
            return b"".join([part async for part in request.stream()])  # which, unlike body(), keeps no copy
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {settings.body_seconds:g} s") from None
    except ClientDisconnect:  # this answer is for the log and the metrics alone
        raise ApiError(499, "the client disconnected before its body had arrived") from None


def ignore(request: Request, name: str) -> None:
    """Report, in the log and by ``warning``, that a part of a request has no effect."""
    request.state.unknown.append(name)
    tell(name)


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
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "?" for c in name[:LONGEST_NAME])
