"""Submission of checked requests, and their growing outputs."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from starlette.requests import Request

from mtp_jax import (
    CompletionOutput,
    LazyPrompt,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchemaError,
    Stream,
    Thoughts,
)
from serve.answers.reasoning import may_think
from serve.base.errors import ApiError
from serve.base.sse import aborted_with_client, streams_of
from serve.base.state import Server
from serve.bodies.reading import LONGEST_NAME, MOST_NAMED, ignore, printable
from serve.bodies.schema import Sampling
from serve.watch.access_log import record_of

_FAILED = (
    "this request failed: the model's numbers were not finite, or its structured output grew too complex"
)

_DEAD_END = (
    "structured output, allowed_token_ids, bad_words, min_tokens and other options of this request together "
    "left no token with which its output could go on; change one of them"
)

# OpenAI's clients retry requests with these statuses.
_NOT_AGAIN = {"x-should-retry": "false"}
_ABORTED = "aborted"


def check_room(server: Server, counts: Sequence[int]) -> None:
    """Raises RequestError for prompts that can never wait together; ``counts``: the n of each prompt."""
    wanted, most = sum(counts), server.allm.admission.max_requests
    if wanted > most:
        n = "/".join(map(str, sorted({*counts})))
        prompts = f"{len(counts)} prompts" if counts[1:] else "a prompt"
        raise RequestError(f"{prompts} of n = {n}, {wanted} requests in all; the queue takes {most}")


async def submit(
    server: Server,
    request: Request,
    body: Sampling,
    prompts: Sequence[str | Sequence[int] | LazyPrompt],
    params: SamplingParams,
    name: str,
) -> list[Stream]:
    """Queue every prompt, or none; prompts unfinished at the end of the request are aborted.

    name: the name of the prompt; several have names that begin with it and end in _0, _1 and so on.

    Raises RequestError, Overloaded, EngineStopped.
    """
    tokenizer = server.allm.about.tokenizer
    if params.max_thinking_tokens is not None and tokenizer is not None and not may_think(tokenizer):
        ignored = f"max_thinking_tokens (the model has no token {Thoughts.CLOSE})"
        if ignored not in request.state.unknown:
            ignore(request, ignored)
        params = replace(params, max_thinking_tokens=None)
    limits = [t for t in (body.timeout, server.settings.request_seconds) if t is not None]
    depth, deepest = params.num_speculative_tokens, server.allm.about.engine.num_speculative_tokens
    if depth is not None and depth > deepest:
        message = f"speculative.max_tokens = {depth}; this server drafts at most {deepest}; give that or less"
        raise ApiError(400, message, "speculative")
    check_room(server, [params.n] * len(prompts))
    record_of(request.scope).asked = params
    streams: list[Stream] = []
    for i, prompt in enumerate(prompts):
        try:
            stream = await server.allm.submit(
                prompt,
                params,
                request_id=f"{name}_{i}" if len(prompts) > 1 else name,
                priority=body.priority or 0,
                timeout=min(limits, default=None),
                cache_salt=body.cache_salt or "",
            )
        except SchemaError as error:
            raise body.unenforced(error) from None
        streams_of(request.scope).append(stream)
        streams.append(stream)
    for path in _widened(body, params)[:MOST_NAMED]:
        ignore(request, path)
    return streams


def _widened(body: Sampling, params: SamplingParams) -> list[str]:
    """Paths of the parts of schemas that are not enforced, shortened in the middle."""
    faults = params.structured.widened if params.structured else ()
    paths = dict.fromkeys(f"{f.path(body.schema_path(f.tool))}.{f.keyword}".rstrip(".") for f in faults)
    half = LONGEST_NAME // 2 - 1
    short = (path if len(path) <= LONGEST_NAME else f"{path[:half]}..{path[-half:]}" for path in paths)
    return [printable(path) for path in short]


async def outputs(
    server: Server, request: Request, streams: Sequence[Stream]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the prompt, its output so far). All prompts are aborted if the client disconnects."""
    record = record_of(request.scope)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(aborted_with_client(request))
        most = record.asked and record.asked.max_tokens
        sources = [await stack.enter_async_context(aclosing(server.metrics.follow(s, most))) for s in streams]
        if len(sources) == 1:
            async for output in sources[0]:
                record.saw(0, output)
                yield 0, output
            return
        # One place: deltas of a client that lags are merged in their streams, not kept here.
        queue = asyncio.Queue[tuple[int, RequestOutput | Exception | None]](1)

        async def read(i: int) -> None:
            try:
                async for output in sources[i]:
                    await queue.put((i, output))
                await queue.put((i, None))
            except Exception as error:
                await queue.put((i, error))

        reading = [asyncio.create_task(read(i)) for i in range(len(sources))]
        left = len(reading)
        try:
            while left:
                i, output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    left -= 1
                else:
                    record.saw(i, output)
                    yield i, output
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)


def check(outputs: Collection[RequestOutput], prompts: int, ending: bool) -> None:
    """Raises ApiError for a completion that failed, or if all have ended before their first token, by their
    deadline, or because the server shuts down. An abort by a client is an answer without tokens.

    outputs: the newest output of every prompt that has any. prompts: number of prompts. ending: whether the
    server shuts down.
    """
    completions = [c for output in outputs for c in output.outputs]
    reasons = {c.finish_reason for c in completions}
    if "error" in reasons:
        raise ApiError(500, _FAILED, code="generation_failed", headers=_NOT_AGAIN)
    if "no_token" in reasons:
        raise ApiError(400, _DEAD_END, code="no_token_allowed", headers=_NOT_AGAIN)
    ended = len(outputs) == prompts and all(output.finished for output in outputs)
    if not ended or any(c.num_tokens for c in completions):
        return
    for c in completions:
        if (error := interruption(c, ending)) and error.code != _ABORTED:
            raise error


def interruption(c: CompletionOutput, ending: bool) -> ApiError | None:
    """The error of a completion that its deadline, an abort or the end of the server has cut; None: none has.

    ending: whether the server shuts down.
    """
    at = f"after {c.num_tokens} tokens" if c.num_tokens else "before its first token"
    if c.finish_reason == "timeout":
        message = f"the request's time was over {at}; raise its timeout, or --request-seconds of the server"
        return ApiError(408, message, code="timeout", headers=_NOT_AGAIN)
    if c.finish_reason != "abort":
        return None
    if ending:
        return ApiError(503, f"the server shut down {at}; send this again", code="unavailable")
    return ApiError(500, f"the request was aborted {at}", code=_ABORTED, headers=_NOT_AGAIN)
