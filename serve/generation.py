"""From checked requests to growing outputs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from starlette.requests import Request

from mtp_jax import CompletionOutput, LazyPrompt, RequestOutput, SamplingParams, Stream
from serve.errors import ApiError
from serve.schema import Sampling
from serve.sse import aborted_with_client
from serve.state import Server


async def submit(
    server: Server, body: Sampling, prompts: Sequence[LazyPrompt], params: SamplingParams
) -> list[Stream]:
    """Queue every prompt, or none. Raises RequestError, Overloaded, EngineStopped."""
    streams: list[Stream] = []
    try:
        for prompt in prompts:
            stream = await server.allm.submit(
                prompt,
                params,
                priority=body.priority or 0,
                timeout=body.timeout or server.settings.request_seconds,
                cache_salt=body.cache_salt or "",
            )
            streams.append(stream)
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


async def outputs(
    server: Server, request: Request, streams: Sequence[Stream]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(which prompt, its output so far) as they come. A client that disconnects aborts them all."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(aborted_with_client(request, streams))
        sources = [await stack.enter_async_context(aclosing(server.metrics.follow(s))) for s in streams]
        if len(sources) == 1:
            async for output in sources[0]:
                yield 0, output
            return
        waiting = {asyncio.ensure_future(anext(source)): i for i, source in enumerate(sources)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    i = waiting.pop(task)
                    try:
                        output = task.result()
                    except StopAsyncIteration:
                        continue
                    yield i, output
                    waiting[asyncio.ensure_future(anext(sources[i]))] = i
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def finals(server: Server, request: Request, streams: Sequence[Stream]) -> list[RequestOutput]:
    """The last output of every prompt, checked. Raises ApiError for one that failed."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(outputs(server, request, streams)) as growing:
        async for i, output in growing:
            last[i] = output
    for output in last.values():
        for completion in output.outputs:
            check(completion)
    return [last[i] for i in range(len(streams))]


def check(completion: CompletionOutput) -> None:
    """Raises ApiError for a completion that failed, or ended without a single token."""
    if completion.finish_reason == "error":
        raise ApiError(500, "the model's numbers were not finite for this request", code="not_finite")
    if not completion.token_ids and completion.finish_reason == "timeout":
        raise ApiError(408, "the request's time was over before its first token", code="timeout")
    if not completion.token_ids and completion.finish_reason == "abort":
        raise ApiError(503, "the server shut down before the first token", code="unavailable")
