"""The engine's sizes, model and health, in the shapes of SGLang, whose clients and gateway read them."""

import asyncio
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import JsonObject, Overloaded, SamplingParams, Stream
from serve.base.errors import ApiError
from serve.base.json_answer import JsonAnswer
from serve.base.state import Server

_FIRST = -(2**31)  # the lowest priority number: such a request is served first
_LOOK_SECONDS = 0.05


async def server_info(server: Server, request: Request) -> Response:
    """The route of the engine's sizes, and of speculation's results over all requests."""
    del request
    about, s = server.allm.about, server.allm.stats()
    config, tokenizer = about.engine, about.tokenizer
    state: JsonObject = {
        "uptime_seconds": time.time() - server.created,
        "num_running_reqs": s.running,
        "num_waiting_reqs": s.waiting,
        "avg_spec_accept_length": (s.accepted_tokens + s.drafts) / s.drafts if s.drafts else None,
        "realised_speedup": s.realised_speedup,
        "cache_pages": {"total": s.pages_total, "used": s.pages_used, "reusable": s.pages_cached},
    }
    info = {
        "model_path": server.settings.model_name,
        "served_model_name": server.settings.model_name,
        "max_model_len": config.longest,
        "max_num_seqs": config.max_num_seqs,
        "num_speculative_tokens": config.num_speculative_tokens,
        "adaptive_depth": config.adaptive_depth,
        "prefix_cache": config.prefix_cache,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "weight_version": server.allm.weight_version,
        **server.fingerprint,
        "released_memory": server.allm.released,
        "paused": server.allm.pause.begun.is_set(),
        "state": server.allm.warm_up.state,
        "verifier": config.verifier,
        "sampling_defaults": about.sampling_defaults,
        "introduction": about.introduction and about.introduction.as_json(),
        "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
        "internal_states": [state],
    }
    return JsonAnswer(info)


async def model_info(server: Server, request: Request) -> Response:
    """The route of the model and the name of its weights."""
    del request
    info = {
        "model_path": server.settings.model_name,
        "tokenizer_path": server.settings.model_name,
        "is_generation": True,
        "preferred_sampling_params": server.allm.about.sampling_defaults or None,
        "weight_version": server.allm.weight_version,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        **server.fingerprint,
    }
    return JsonAnswer(info)


async def health_generate(server: Server, request: Request) -> Response:
    """The route that answers once a token has been generated, for it or for requests before it.

    A pause is healthy, too: it generates nothing on purpose.
    """
    del request
    if reason := server.unready():
        raise ApiError(503, reason, code="unavailable")
    if not await _generates(server):
        seconds = server.settings.ready_seconds
        raise ApiError(503, f"no token has been generated within {seconds:.0f} s", code="unavailable")
    return JsonAnswer({"status": "ok"})


async def _generates(server: Server) -> bool:
    """Whether a prompt of one token is answered in time, or requests advance that may have all slots."""
    paused, busy = server.allm.pause.begun, server.allm.live > 0
    before, stream = _computed(server), None
    if paused.is_set():
        return True
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with suppress(Overloaded):
        stream = await server.allm.submit([0], params, priority=_FIRST)
    answer = asyncio.ensure_future(_ended(stream))
    try:
        async with asyncio.timeout(server.settings.ready_seconds):
            while not paused.is_set() and not (busy and _computed(server) != before):
                await asyncio.wait([answer], timeout=_LOOK_SECONDS)
                if answer.done():
                    return answer.result()
        return True
    except TimeoutError:
        return False
    finally:
        answer.cancel()
        if stream:
            stream.abort()


def _computed(server: Server) -> tuple[float, ...]:
    """Totals that grow with every result of the device."""
    s = server.allm.stats()
    return s.generation_tokens, s.prefill_seconds


async def _ended(stream: Stream | None) -> bool:
    """Wait for the end of a stream, for ever where there is none; return whether its token came."""
    if stream is None:
        await asyncio.Event().wait()
        return False
    outputs = [output async for output in stream]
    return outputs[-1].outputs[0].finish_reason == "length"
