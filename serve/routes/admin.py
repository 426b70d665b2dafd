"""Routes that need an admin key: weights and memory, in SGLang's shapes, and hidden states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CheckpointError, ConfigError, JsonObject
from serve.base.errors import ApiError
from serve.base.json_answer import JsonAnswer
from serve.base.state import Server
from serve.bodies.admin import (
    AbortBody,
    ContinueBody,
    HiddenStatesBody,
    PauseBody,
    ReleaseBody,
    ResumeBody,
    UpdateBody,
    VersionBody,
)
from serve.bodies.fields import Body
from serve.bodies.reading import read, warning

_Body = TypeVar("_Body", bound=Body)


async def update_weights(server: Server, request: Request) -> Response:
    """The route that replaces all weights, or none."""
    body = await read(server.settings, request, UpdateBody)
    try:
        found = await server.allm.update_weights(
            body.model_path,
            body.draft_model_path,
            keep_draft=body.keep_draft is True,
            weight_version=body.weight_version,
            probe=body.probe,
            abort=body.abort_all_requests is True,
        )
    except (CheckpointError, ConfigError) as error:
        raise ApiError(400, str(error), "model_path") from error
    except OSError as error:  # a name too long, a file that is gone or cannot be read
        message = f"the files of model_path cannot be read: {error.strerror}; nothing has changed"
        raise ApiError(400, message, "model_path") from error
    answer = {
        "success": True,
        "message": f"the weights are those of {body.model_path}",
        "weight_version": found.weight_version,
        "acceptance_length": {"before": found.acceptance_before, "after": found.acceptance_after},
    }
    return _json(request, answer)


async def update_weight_version(server: Server, request: Request) -> Response:
    """The route that names the weights. Requests end only where the body says so."""
    body = await read(server.settings, request, VersionBody)
    if body.abort_all_requests:
        server.allm.abort(None)
    await server.allm.name_weights(body.new_version)
    message = f"the weights are named {body.new_version}"
    return _json(request, {"success": True, "message": message, "new_version": body.new_version})


async def pause(server: Server, request: Request) -> Response:
    """The route that stops generation; requests that come meanwhile wait."""
    body = await _read_any(server, request, PauseBody)
    await server.allm.pause.begin(body.mode or "abort")
    return _json(request, {"status": "ok", "message": "generation is paused"})


async def unpause(server: Server, request: Request) -> Response:
    """The route that lets generation go on; without a pause it changes nothing."""
    await _read_any(server, request, ContinueBody)
    await server.allm.pause.end()
    return _json(request, {"status": "ok", "message": "generation goes on"})


async def release_memory(server: Server, request: Request) -> Response:
    """The route that releases memory, once every request has ended."""
    body = await _read_any(server, request, ReleaseBody)
    with _tags_refused():
        await server.allm.release_memory(
            body.tags, backup=body.backup is not False, abort=body.abort_all_requests is True
        )
    return _json(request, {"success": True, "released": server.allm.released})


async def resume_memory(server: Server, request: Request) -> Response:
    """The route."""
    body = await _read_any(server, request, ResumeBody)
    with _tags_refused():
        await server.allm.resume_memory(body.tags)
    return _json(request, {"success": True, "released": server.allm.released})


async def abort_request(server: Server, request: Request) -> Response:
    """The route that ends requests with the tokens so far. A name that no request has may have ended."""
    body = await read(server.settings, request, AbortBody)
    if body.abort_all and not request.state.administers:
        message = "abort_all needs the admin key (--admin-key): it ends the requests of all clients"
        raise ApiError(403, message, "abort_all")
    server.allm.abort(None if body.abort_all else body.rid)
    return _json(request, {"success": True})


async def hidden_states(server: Server, request: Request) -> Response:
    """The route of hidden states, final or of some layers, with the name of the weights that made them."""
    body = await read(server.settings, request, HiddenStatesBody)
    version, states = await server.allm.hidden_states(body.input_ids, body.positions, body.layers)
    return _json(request, {"hidden_states": states.tolist(), "weight_version": version})


async def weight_version(server: Server, request: Request) -> Response:
    """The route of the weights' name. It needs no admin key."""
    return _json(request, {"weight_version": server.allm.weight_version})


async def _read_any(server: Server, request: Request, kind: type[_Body]) -> _Body:
    """The body, all of whose fields have defaults: SGLang's clients may send none at all."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    return await read(server.settings, request, kind) if has_body else kind()


@contextmanager
def _tags_refused() -> Iterator[None]:
    """A tag that this model does not have is the client's error."""
    try:
        yield
    except ConfigError as error:
        raise ApiError(400, str(error), "tags") from error


def _json(request: Request, answer: JsonObject) -> Response:
    return JsonAnswer(answer, headers=warning(request))
