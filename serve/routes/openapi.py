"""/openapi.json: the table of routes, with the classes that check their bodies."""

from importlib import metadata

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject
from serve.base.json_answer import JsonAnswer
from serve.base.state import Server
from serve.routes.route import Routes

_TEMPLATE = "#/components/schemas/{model}"


async def openapi(server: Server, request: Request) -> Response:
    """The document, in OpenAPI 3.1."""
    del server
    routes: Routes = request.app.state.routes
    kinds = [(kind, "validation") for route in routes for kind in route.bodies]
    names, schemas = models_json_schema(kinds, ref_template=_TEMPLATE)  # pyright: ignore[reportArgumentType]
    paths: dict[str, JsonObject] = {}
    for route in routes:
        about: JsonObject = {"responses": {"default": {"description": "an answer, or an error object"}}}
        if any_of := [names[kind, "validation"] for kind in route.bodies]:
            content = {"application/json": {"schema": {"anyOf": any_of} if any_of[1:] else any_of[0]}}
            about["requestBody"] = {"required": True, "content": content}
        paths[route.path.replace(":path", "")] = {method.lower(): about for method in route.methods}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "mtp-jax", "version": metadata.version("mtp-jax")},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
    return JsonAnswer(document)
