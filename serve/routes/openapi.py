"""/openapi.json: bodies of the routes, from the classes that check them."""

from importlib import metadata

from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject
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
from serve.bodies.messages import CountBody, MessagesBody
from serve.bodies.native import GenerateBody
from serve.bodies.responses import ResponsesBody
from serve.bodies.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody

BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
    "/generate": (GenerateBody,),
    "/abort_request": (AbortBody,),
    "/update_weight_version": (VersionBody,),
    "/pause_generation": (PauseBody,),
    "/continue_generation": (ContinueBody,),
    "/update_weights_from_disk": (UpdateBody,),
    "/release_memory_occupation": (ReleaseBody,),
    "/resume_memory_occupation": (ResumeBody,),
    "/hidden_states": (HiddenStatesBody,),
}
_TEMPLATE = "#/components/schemas/{model}"


async def openapi(server: Server, request: Request) -> Response:
    """The document, in OpenAPI 3.1."""
    del server
    kinds = [(kind, "validation") for kinds in BODIES.values() for kind in kinds]
    names, schemas = models_json_schema(kinds, ref_template=_TEMPLATE)  # pyright: ignore[reportArgumentType]
    paths: dict[str, JsonObject] = {}
    for route in request.app.routes:
        for method in sorted(route.methods - {"HEAD"}):
            about: JsonObject = {"responses": {"default": {"description": "an answer, or an error object"}}}
            if kinds := BODIES.get(route.path):
                any_of = [names[kind, "validation"] for kind in kinds]
                content = {"application/json": {"schema": {"anyOf": any_of} if any_of[1:] else any_of[0]}}
                about["requestBody"] = {"required": True, "content": content}
            paths.setdefault(route.path.replace(":path", ""), {})[method.lower()] = about
    document = {
        "openapi": "3.1.0",
        "info": {"title": "mtp-jax", "version": metadata.version("mtp-jax")},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }
    return Response(to_json(document), media_type="application/json")
