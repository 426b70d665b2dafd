"""The routes that generate nothing."""

from datetime import UTC, datetime
from functools import partial
from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import LazyPrompt
from serve.answers.asking import ChatPrompt
from serve.answers.shapes import token_name
from serve.base.errors import ApiError
from serve.base.json_answer import JsonAnswer, as_json
from serve.base.state import Server
from serve.bodies.reading import read, warning
from serve.bodies.schema import DetokenizeBody, TokenizeBody, TokenizeChatBody


async def health(server: Server, request: Request) -> Response:
    """The route that shows that the process runs, and no more, as it needs no key."""
    del server, request
    return JsonAnswer({"status": "ok"})


async def ready(server: Server, request: Request) -> Response:
    """The route of readiness: 200, or 503 with the reason; and the progress of compilation."""
    del request
    reason, state = server.unready(), server.allm.warm_up.state
    if reason is None:
        return JsonAnswer({"status": "ready", "state": state})
    return JsonAnswer({"status": "unready", "reason": reason, "state": state}, 503)


async def models(server: Server, request: Request) -> Response:
    """The list of models, in OpenAI's shape and Anthropic's: there is one, under each of its names."""
    del request
    names = server.settings.names
    ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return JsonAnswer({"object": "list", "data": [_model(server, name) for name in names], **ends})


async def model(server: Server, request: Request) -> Response:
    """One model of that list."""
    name = request.path_params["name"]
    if name in server.settings.names:
        return JsonAnswer(_model(server, name))
    if not name:
        raise ApiError(404, "there is no /v1/models/ here; use /v1/models, or /v1/models/ and a model's name")
    raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")


def _model(server: Server, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": server.created,
        "created_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "owned_by": server.allm.about.mark or "mtp-jax",
        "max_model_len": server.allm.about.engine.longest,
        "max_input_tokens": server.allm.about.engine.longest,
    }


async def version(server: Server, request: Request) -> Response:
    """The version of this package, and the mark of answers that are not a model's own."""
    del request
    return JsonAnswer({"version": metadata.version("mtp-jax"), **server.fingerprint})


async def metrics(server: Server, request: Request) -> Response:
    """Metrics for Prometheus."""
    del request
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenize(server: Server, request: Request) -> Response:
    """Text, or a conversation as the chat template renders it, to token ids."""
    body = await read(server.settings, request, TokenizeChatBody, TokenizeBody)
    tokenizer = server.tokenizer
    limit = server.allm.about.engine.longest

    if isinstance(body, TokenizeChatBody):
        encode, characters = ChatPrompt(server, body), body.characters
    else:
        encode = partial(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
        characters = len(body.prompt)

    def answer() -> bytes:
        tokens = encode()
        found: dict[str, object] = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [token_name(tokenizer, t) for t in tokens]
        return as_json(found)

    answered = await server.allm.in_queue(LazyPrompt(encode, characters), answer)
    if isinstance(encode, ChatPrompt):
        encode.warn(request)
    return JsonAnswer(answered, headers=warning(request))


async def detokenize(server: Server, request: Request) -> Response:
    """Token ids to text."""
    body = await read(server.settings, request, DetokenizeBody)
    tokenizer, vocab = server.tokenizer, server.allm.about.model.vocab_size
    wrong = next((t for t in body.tokens if t >= vocab), None)
    if wrong is not None:
        raise ApiError(400, f"tokens has token {wrong}; expected ids from 0 to {vocab - 1}", "tokens")
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    text = await server.allm.in_queue(body.tokens, decode)
    return JsonAnswer({"prompt": text}, headers=warning(request))


async def load(server: Server, request: Request) -> Response:
    """The numbers of requests that run and wait, in vLLM's shape."""
    del request
    return JsonAnswer({"server_load": server.allm.live})


async def tokenizer_info(server: Server, request: Request) -> Response:
    """The tokenizer's class and special tokens, in vLLM's shape, which tools of remote evaluation read."""
    del request
    tokenizer = server.tokenizer

    def name(token: int | None) -> str | None:
        return None if token is None else token_name(tokenizer, token)

    found = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": server.allm.about.engine.longest,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": name(tokenizer.bos_id),
        "eos_token": name(next(iter(tokenizer.eos_ids), None)),
        "chat_template": tokenizer.chat_template,
    }
    return JsonAnswer(found)


async def flush_cache(server: Server, request: Request) -> Response:
    """Forget the pages that only the prefix cache keeps."""
    del request
    await server.allm.flush_prefix_cache()
    return JsonAnswer({"success": True})
