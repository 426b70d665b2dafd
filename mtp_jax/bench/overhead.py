"""What the server costs: the same requests through ``LLM``, ``AsyncLLM`` and HTTP, over one engine.

All of it is in this process, so that every way has the same compiled programs and the same memory; the client
is in another, as it would be. Depth is fixed: every way takes the same steps.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop

from mtp_jax.api.async_llm import AsyncLLM
from mtp_jax.api.completions import Prompt
from mtp_jax.api.llm import LLM
from mtp_jax.bench import raw_client
from mtp_jax.bench.raw_client import Answer
from mtp_jax.bench.report import Report, Spread
from mtp_jax.bench.serve import texts
from mtp_jax.bench.synthetic import random_prompts
from mtp_jax.engine.request import SamplingParams
from mtp_jax.errors import ConfigError, MtpJaxError

Served = Callable[[LLM], AbstractAsyncContextManager[tuple[AsyncLLM, str]]]
"""Serves a model while its block runs, on this event loop; gives the engine and the base URL."""

_WAYS = ("LLM", "AsyncLLM", "HTTP, whole answers", "HTTP, streamed")
_WARM_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Load:
    """What every way is given.

    Attributes:
        concurrency: requests at a time, and slots.
        depth: drafts per step.
        requests: per round.
        prompt_length: in characters, of a model without a tokenizer in tokens.
        max_tokens: of every request; greedy.
        rounds: of every way, alternating, after one that is not measured.
    """

    concurrency: int
    depth: int
    requests: int
    prompt_length: int
    max_tokens: int
    rounds: int


@dataclass(frozen=True)
class Run:
    """One round of one way.

    Attributes:
        seconds: of the wall.
        processor: seconds of engine and server together.
        loop: those of the event loop's thread: all that is served beside the engine.
        client: the client's.
        launches: prefills and steps.
    """

    tokens: int
    seconds: float
    processor: float
    loop: float
    client: float
    launches: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def run(model: str, open_model: Callable[..., LLM], served: Served, load: Load) -> Report:
    """Measure. ``open_model``: LLM with the model and these sizes. Raises ConfigError, MtpJaxError."""
    if min(load.concurrency, load.requests, load.max_tokens, load.rounds) < 1 or load.depth < 0:
        raise ConfigError("concurrency, requests, max tokens and rounds are 1 or more, depth 0 or more")
    llm = open_model(
        num_speculative_tokens=load.depth,
        max_num_seqs=load.concurrency,
        max_model_len=load.prompt_length + load.max_tokens,
        prefix_cache=False,
    )
    # A model without a tokenizer, a synthetic one, gets random ids.
    prompts_of = texts if llm.tokenizer else partial(random_prompts, llm.config)
    prompts = prompts_of(load.requests, load.prompt_length)
    runs = uvloop.run(_measure(llm, served, prompts, load))  # as in a server
    return _report(model, load, runs)


async def _measure(llm: LLM, served: Served, prompts: Sequence[Prompt], load: Load) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {way: [] for way in _WAYS}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as client:
        async with served(llm) as (allm, url):
            while allm.warming:
                await asyncio.sleep(_WARM_POLL_SECONDS)

            def over_http(stream: bool) -> Awaitable[tuple[int, float]]:
                ask = partial(_client, url, prompts, load.max_tokens, load.concurrency, stream)
                return asyncio.get_running_loop().run_in_executor(client, ask)

            ways = dict(
                zip(
                    _WAYS,
                    (
                        partial(_llm, allm, prompts, load.max_tokens),
                        partial(_async_llm, allm, prompts, load),
                        partial(over_http, False),
                        partial(over_http, True),
                    ),
                    strict=True,
                )
            )
            for i in range(load.rounds + 1):
                for way in _WAYS[i % len(_WAYS) :] + _WAYS[: i % len(_WAYS)]:
                    before = _clocks(llm)
                    tokens, asking = await ways[way]()
                    seconds, busy, loop, launches = (b - a for a, b in zip(before, _clocks(llm), strict=True))
                    runs[way] += [Run(tokens, seconds, busy, loop, asking, int(launches))] if i else []
    return runs


def _clocks(llm: LLM) -> tuple[float, ...]:
    return time.perf_counter(), time.process_time(), time.thread_time(), llm.engine.launches


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def _llm(allm: AsyncLLM, prompts: Sequence[Prompt], max_tokens: int) -> tuple[int, float]:
    outputs = await allm.on_engine(lambda: allm.llm.generate(prompts, _params(max_tokens)))
    return sum(len(c.token_ids) for o in outputs for c in o.outputs), 0.0


async def _async_llm(allm: AsyncLLM, prompts: Sequence[Prompt], load: Load) -> tuple[int, float]:
    waiting = iter(prompts)

    async def user() -> int:
        tokens = 0
        for prompt in waiting:
            *_, last = [output async for output in allm.generate(prompt, _params(load.max_tokens))]
            tokens += len(last.outputs[0].token_ids)
        return tokens

    return sum(await asyncio.gather(*(user() for _ in range(load.concurrency)))), 0.0


def _client(
    url: str, prompts: Sequence[Prompt], max_tokens: int, concurrency: int, stream: bool
) -> tuple[int, float]:
    """In a process of its own: ask for everything; tokens, and the processor time of asking."""
    began = time.process_time()
    tokens = asyncio.run(_ask_all(url, prompts, max_tokens, concurrency, stream))
    return tokens, time.process_time() - began


async def _ask_all(
    url: str, prompts: Sequence[Prompt], max_tokens: int, concurrency: int, stream: bool
) -> int:
    host, port = url.removeprefix("http://").split(":")
    waiting = iter(prompts)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    if not isinstance(prompts[0], str):
        body["return_token_ids"] = True  # without text a stream has nothing else to tell

    async def user() -> int:
        tokens = 0
        for prompt in waiting:
            exchange = await raw_client.connect(host, int(port))
            exchange.send(raw_client.post(host, int(port), {**body, "prompt": prompt}))
            tokens += _tokens(await exchange.answer)
        return tokens

    return sum(await asyncio.gather(*(user() for _ in range(concurrency))))


def _tokens(answer: Answer) -> int:
    """Of one answer, streamed or not."""
    found = answer.body.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
    if answer.status != 200 or not found.isdigit():
        told = answer.body[:200].decode(errors="replace")
        raise MtpJaxError(f"the server answered {answer.status}: {told}")
    return int(found)


def _report(model: str, load: Load, runs: dict[str, list[Run]]) -> Report:
    rows, figures = [], {}
    for way, own in runs.items():
        ratio = Spread.of([a.rate / b.rate for a, b in zip(own, runs["LLM"], strict=True)])
        busy = Spread.of([a.processor / b.processor for a, b in zip(own, runs["LLM"], strict=True)])
        rate, per_token = Spread.of([r.rate for r in own]), Spread.of([r.processor / r.tokens for r in own])
        loop = Spread.of([r.loop / r.processor for r in own])
        client = Spread.of([r.client / r.tokens for r in own])
        launches = Spread.of([float(r.launches) for r in own])
        figures[way] = {"throughput": ratio, "processor": busy, "rounds": [vars(r) for r in own]}
        cells = (rate.show(0), ratio.show(3), per_token.show(3, 1e3), busy.show(3), loop.show(1, 100))
        rows.append((way, *cells, launches.show(0), client.show(3, 1e3)))
    headers = (
        "through",
        "tokens/s",
        "over LLM",
        "processor, ms/token",
        "over LLM",
        "event loop, % of it",
        "launches",
        "client, ms/token",
    )
    note = (
        f"Closed loop, {load.concurrency} at a time, {load.rounds} alternating rounds of {load.requests} "
        f"greedy requests of {load.prompt_length} characters (of a model without a tokenizer: tokens) and "
        f"{load.max_tokens} tokens, depth {load.depth} in every step. Medians and quartiles, ratios within a "
        "round. Processor seconds are those of engine and server together, of which the event loop's thread "
        "is all that comes beside the engine; the client is another process of this machine. Launches: "
        "prefills and steps of a round."
    )
    return Report(f"Overhead of serving: {model}", headers, rows, [note], {"ways": figures})
