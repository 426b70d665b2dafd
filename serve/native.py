"""/generate and /server_info in the shapes of SGLang, whose benchmark client reads them."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, Logprob, RequestOutput, SamplingParams, Tokenizer
from serve.answers import finite, token_name
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
    """/generate."""

    model: Name | None = None
    text: str | None = None
    input_ids: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Annotated[int, bounds("logprobs")] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text: give exactly one of text and input_ids")
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt are scored: SGLang does from ``logprob_start_len`` on, -1 for none."""
        return self.return_logprob is True and self.logprob_start_len not in (None, -1)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """For the engine; ``defaults``: the model's own, for what is not named. Raises RequestError."""
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
        most = p.max_new_tokens or _DEFAULT_MAX_TOKENS
        top = (self.top_logprobs_num or 0) if self.return_logprob else None
        scored = top if self.scores_prompt else None
        params = p.params(most, self.stream, top, scored, defaults=defaults)
        return replace(params, output_kind="cumulative") if self.stream else params


async def generate(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, GenerateBody)
    prompt = body.text if body.text is not None else body.input_ids or []
    params = body.params(server.sampling_defaults)
    streams = await submit(server, request, body.sampling_params or Sampling(), [prompt], params)
    name, scores = new_id(), _Scores(server.allm.llm.tokenizer, body)

    def objects(output: RequestOutput) -> list[dict[str, Any]]:
        return [_object(name, output, c, scores) | {"index": c.index} for c in output.outputs]

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(outputs(server, request, streams)) as growing:
            async for _, output in growing:
                check([output], 1)
                yield b"".join(event(o) for o in objects(output))

    if body.stream:
        return EventStream(events(), warning(request))
    (output,) = await finals(server, request, streams)
    found = objects(output)
    answer = to_json(found[0] if len(found) == 1 else found)
    return Response(answer, headers=warning(request), media_type="application/json")


class _Scores:
    """Log-probabilities in SGLang's shape: [log-probability, id, text] per token, text only if asked for."""

    def __init__(self, tokenizer: Tokenizer | None, body: GenerateBody) -> None:
        self._tokenizer, self._body = tokenizer, body
        self._prompt: Sequence[dict[int, Logprob] | None] = ()

    def of(self, output: RequestOutput, c: CompletionOutput) -> dict[str, Any]:
        """What the answer says of a completion and, from the token asked for on, of its prompt."""
        if not self._body.return_logprob:
            return {}
        found = self._lists("output", c.token_ids, c.logprobs or [])
        if self._body.scores_prompt:
            start = self._body.logprob_start_len or 0
            self._prompt = output.prompt_logprobs or self._prompt
            found |= self._lists("input", output.prompt_token_ids[start:], self._prompt[start:])
        return found

    def _lists(
        self, of: str, ids: Sequence[int], scores: Sequence[dict[int, Logprob] | None]
    ) -> dict[str, Any]:
        pairs = list(zip(ids, scores, strict=False))  # a prompt that ended during its prefill has fewer
        found: dict[str, Any] = {
            f"{of}_token_logprobs": [self._entry(t, s[t] if s else None) for t, s in pairs]
        }
        if self._body.top_logprobs_num:
            found[f"{of}_top_logprobs"] = [self._best(s) if s else None for _, s in pairs]
        return found

    def _best(self, scores: dict[int, Logprob]) -> list[list[Any]]:
        best = sorted(scores.items(), key=lambda item: item[1].rank)[: self._body.top_logprobs_num]
        return [self._entry(token, score) for token, score in best]

    def _entry(self, token: int, score: Logprob | None) -> list[Any]:
        text = token_name(self._tokenizer, token) if self._body.return_text_in_logprobs else None
        return [score and finite(score), token, text]


def _object(name: str, output: RequestOutput, c: CompletionOutput, scores: _Scores) -> dict[str, Any]:
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
        "weight_version": output.weight_version,
        **scores.of(output, c),
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
        "weight_version": server.allm.llm.weight_version,
        "released_memory": server.allm.llm.released,
        "state": server.allm.warm_up.state,
        "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
        "internal_states": [state],
    }
    return Response(to_json(info), media_type="application/json")
