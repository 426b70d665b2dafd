"""A client of any OpenAI-compatible server: streamed completions with the times at which chunks came."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from mtp_jax.bench.latency import Timeline
from mtp_jax.errors import MtpJaxError

_SECONDS = 600.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TEXTS = ("text", "content", "reasoning", "reasoning_content")  # under which servers send it
_COUNTERS = {
    "drafts": re.compile(r"^vllm:spec_decode_num_drafts_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE),
    "accepted": re.compile(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"[^}]*\} ([\d.e+]+)$',
        re.MULTILINE,
    ),
}


@dataclass(frozen=True)
class Target:
    """A server and what is asked of it.

    Attributes:
        base_url: without /v1.
        model: its name there; empty: the first that it lists.
        chat: /v1/chat/completions instead of /v1/completions.
        max_tokens: of every answer, past end-of-sequence tokens.
        temperature: 0 is greedy.
    """

    base_url: str
    model: str
    chat: bool
    max_tokens: int
    temperature: float


@dataclass
class Answer:
    """One request: its timeline, whose arrivals are chunks; what went wrong, if something did; the text."""

    timeline: Timeline
    error: str | None = None
    text: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Speculated:
    """The server's counters of speculation: windows with drafts, and accepted drafts by position."""

    drafts: int
    accepted: tuple[int, ...]

    def since(self, before: "Speculated") -> "Speculated":
        """What was added."""
        padded = (*before.accepted, *(0,) * len(self.accepted))
        return Speculated(
            self.drafts - before.drafts, tuple(a - b for a, b in zip(self.accepted, padded, strict=False))
        )


def connect(base_url: str, api_key: str | None) -> httpx2.AsyncClient:
    """A client with as many connections as it takes. Raises MtpJaxError for what is no URL.

    A server on this computer is asked directly, whatever proxies the environment names.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        proxies = httpx2.URL(base_url).host not in _LOOPBACK
        return httpx2.AsyncClient(
            base_url=base_url, headers=headers, timeout=_SECONDS, limits=limits, trust_env=proxies
        )
    except httpx2.InvalidURL as error:
        raise MtpJaxError(f"{base_url!r} is no URL: {error}") from error


async def model_name(client: httpx2.AsyncClient) -> str:
    """The first model that the server names. Raises MtpJaxError if there is no server."""
    try:
        listed = await client.get("/v1/models")
        listed.raise_for_status()
        return listed.json()["data"][0]["id"]
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise MtpJaxError(f"{client.base_url}v1/models does not answer as it should: {error}") from error


async def flush(client: httpx2.AsyncClient) -> bool:
    """Ask the server to forget prefixes; returns whether it did."""
    try:
        return (await client.post("/flush_cache")).is_success
    except httpx2.HTTPError:
        return False


async def speculated(client: httpx2.AsyncClient) -> Speculated | None:
    """The counters of /metrics; None where there are none."""
    try:
        text = (await client.get("/metrics")).text
    except httpx2.HTTPError:
        return None
    drafts = [float(n) for n in _COUNTERS["drafts"].findall(text)]
    accepted = Counter[int]()  # over all engines of the server
    for position, n in _COUNTERS["accepted"].findall(text):
        accepted[int(position)] += int(float(n))
    return Speculated(int(sum(drafts)), tuple(accepted[i] for i in sorted(accepted))) if drafts else None


async def ask(client: httpx2.AsyncClient, target: Target, prompt: str, extra: Mapping[str, Any]) -> Answer:
    """Stream one completion. Errors are part of the answer."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": target.max_tokens,
        "temperature": target.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}),
        **extra,
    }
    path = "/v1/chat/completions" if target.chat else "/v1/completions"
    answer = Answer(Timeline(time.perf_counter()))
    try:
        async with client.stream("POST", path, json=body) as response:
            if not response.is_success:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _read(answer, json.loads(line.removeprefix("data: ")))
    except (httpx2.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.timeline.arrivals:
        answer.error = "the stream ended without a token"
    return answer


def _read(answer: Answer, chunk: dict[str, Any]) -> None:
    if error := chunk.get("error"):
        answer.error = str((isinstance(error, dict) and error.get("message")) or error)
    if usage := chunk.get("usage"):
        answer.timeline.total = usage["completion_tokens"]
    for choice in chunk.get("choices") or ():
        said = choice.get("delta") or choice
        text = next(filter(None, map(said.get, _TEXTS)), "")
        if text:
            answer.timeline.add(time.perf_counter(), 1)
            answer.text.append(text)


Ask = Callable[[str], Awaitable[Answer]]


async def closed_loop(ask: Ask, prompts: Sequence[str], concurrency: int) -> list[Answer]:
    """``concurrency`` requests at a time: a new one as soon as one is done."""
    waiting = iter(prompts)

    async def user() -> list[Answer]:
        return [await ask(prompt) for prompt in waiting]

    users = await asyncio.gather(*(user() for _ in range(concurrency)))
    return [answer for answers in users for answer in answers]


async def poisson(ask: Ask, prompts: Sequence[str], rate: float, seed: int = 0) -> list[Answer]:
    """Requests that arrive independently of each other, ``rate`` per second on average."""
    rng, loop = np.random.default_rng(seed), asyncio.get_running_loop()
    due, tasks = loop.time(), []
    for prompt in prompts:
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.ensure_future(ask(prompt)))
        due += rng.exponential(1 / rate)
    return list(await asyncio.gather(*tasks))
