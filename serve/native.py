"""/generate and /server_info in the shapes of SGLang, whose benchmark client reads them."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, RequestOutput, SamplingParams
from serve.bodies import read, warning
from serve.fields import Body, Name, Schema, Structured, Text, bounds
from serve.generation import check, finals, outputs, submit
from serve.ids import new_id
from serve.schema import Sampling
from serve.sse import EventStream, event
from serve.state import Server

_DEFAULT_MAX_TOKENS = 128


class NativeSampling(Sampling):
    """SGLang's names where they differ from OpenAI's."""

    max_new_tokens: Annotated[int, bounds("max_tokens")] | None = None
    min_new_tokens: Annotated[int, bounds("min_tokens")] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    no_stop_trim: bool | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Any = None
    structural_tag: Any = None

    @model_validator(mode="after")
    def _applies(self) -> "NativeSampling":
        if self.ebnf is not None or self.structural_tag is not None:
            raise ValueError("ebnf, structural_tag: not supported; use json_schema or regex")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema: not with regex; leave one of them out")
        if (self.json_schema is not None or self.regex is not None) and self.structured_outputs is not None:
            raise ValueError("structured_outputs: not with json_schema or regex; leave one of them out")
        if self.speculative is not None and self.speculative.metrics is not None:
            raise ValueError("speculative.metrics: not on this route, see meta_info; leave it out")
        return self


class GenerateBody(Body):
    """/generate. Log-probabilities are given by the other routes only."""

    model: Name | None = None
    text: str | None = None
    input_ids: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: Literal[False] | None = None
    return_routed_experts: Literal[False] | None = None
    logprob_start_len: Literal[-1] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text: give exactly one of text and input_ids")
        return self

    def params(self) -> SamplingParams:
        """For the engine. Raises RequestError."""
        p = self.sampling_params or NativeSampling()
        structured = None
        if p.json_schema is not None or p.regex is not None:
            structured = Structured.model_validate({"json": p.json_schema, "regex": p.regex})
        renamed = {
            "min_tokens": p.min_new_tokens,
            "seed": p.sampling_seed,
            "include_stop_str_in_output": p.no_stop_trim,
            "structured_outputs": structured,
        }
        p = p.model_copy(update={name: value for name, value in renamed.items() if value is not None})
        params = p.params(p.max_new_tokens or _DEFAULT_MAX_TOKENS, self.stream)
        return replace(params, output_kind="cumulative") if self.stream else params


async def generate(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, GenerateBody)
    prompt = body.text if body.text is not None else body.input_ids or []
    streams = await submit(server, body.sampling_params or Sampling(), [prompt], body.params())
    name = new_id()

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(outputs(server, request, streams)) as growing:
            async for _, output in growing:
                check([output], 1)
                yield b"".join(event(o) for o in _objects(name, output))

    if body.stream:
        return EventStream(events(), warning(request))
    (output,) = await finals(server, request, streams)
    objects = _objects(name, output)
    answer = to_json(objects[0] if len(objects) == 1 else objects)
    return Response(answer, headers=warning(request), media_type="application/json")


def _objects(name: str, output: RequestOutput) -> list[dict[str, Any]]:
    return [_object(name, output, c) | {"index": c.index} for c in output.outputs]


def _object(name: str, output: RequestOutput, c: CompletionOutput) -> dict[str, Any]:
    """A completion so far: the text and the ids are cumulative."""
    s, seconds = c.speculation, output.timing.finished
    reason: dict[str, Any] | None = {"type": c.finish_reason} if c.finish_reason else None
    if reason and c.finish_reason == "length":
        reason["length"] = c.num_tokens
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": c.num_tokens,
        "cached_tokens": output.cached_tokens,
    }
    if s.drafted:
        meta |= {
            "spec_accept_length": s.acceptance_length,
            "spec_accept_rate": s.accepted / s.drafted,
            "spec_verify_ct": s.steps,
        }
    if seconds is not None:
        meta["e2e_latency"] = seconds
    return {"text": c.text, "output_ids": c.token_ids, "meta_info": meta}


async def server_info(server: Server, request: Request) -> Response:
    """The route: the engine's sizes, and what speculation achieved over all requests."""
    del request
    config, s = server.allm.llm.engine.config, server.allm.llm.engine.stats()
    tokenizer = server.allm.llm.tokenizer
    state: dict[str, Any] = {
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
        "base_model": server.settings.base_model,
        "state": server.allm.warm_up.state,
        "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
        "internal_states": [state],
    }
    return Response(to_json(info), media_type="application/json")
