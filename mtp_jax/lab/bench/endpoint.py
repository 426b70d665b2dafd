"""A server with OpenAI's API, seen by a client: streamed answers, and the drafts that it counted."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.lab.bench.latency import Timeline
from mtp_jax.lab.bench.traffic import TrafficPrompt

Api = Literal["completions", "chat"]
# Places of a server's token counts: in every chunk, at the end of an answer, or nowhere.
Counting = Literal["chunks", "answers", "none"]
_ROUTES: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_REFUSAL_CHARACTERS = 200  # characters of a refusal that are shown: it may be a page of HTML


@dataclass(frozen=True)
class Answered:
    """The outcome of a request.

    Attributes:
        timeline: the times at which its tokens came.
        prompt_tokens: the server's count of prompt tokens; 0 without a count.
        counts: place of the server's token counts.
        failure: the reason why the answer is incomplete; empty for a complete answer.
    """

    timeline: Timeline
    prompt_tokens: int = 0
    counts: Counting = "none"
    failure: str = ""


@dataclass(frozen=True)
class Endpoint:
    """The address and the form of requests.

    Attributes:
        http: a client at the server's address, without /v1.
        api: the route.
        fields: fields of every request, the model among them.
        counts: fields that ask for counts; a server may ignore them.
        mark: the mark of the server's answers, as mtp-jax says it; empty: they are a model's own.
    """

    http: httpx2.AsyncClient
    api: Api
    fields: JsonMapping
    counts: Counting = "chunks"
    mark: str = ""

    def body(self, prompt: TrafficPrompt) -> JsonObject:
        """The body of a streamed request. Raises ConfigError for a prompt that the route does not take."""
        options: JsonObject = {"include_usage": True}
        if self.counts == "chunks":
            options["continuous_usage_stats"] = True
        stream = {"stream": True} | ({} if self.counts == "none" else {"stream_options": options})
        told = [message for message in prompt if isinstance(message, dict)]
        if self.api == "completions":  # which has no conversations: their texts, one after the other
            text = "\n\n".join(message["content"] for message in told) if told else prompt
            return {**self.fields, **stream, "prompt": text}
        if not told and not isinstance(prompt, str):
            raise ConfigError("a chat takes no token ids; leave --vocabulary out, or give --api completions")
        return {**self.fields, **stream, "messages": told or [{"role": "user", "content": prompt}]}

    async def ask(self, prompt: TrafficPrompt, due: float) -> Answered:
        """Send a request, and measure times from ``due``, in seconds of ``perf_counter``."""
        answer, body = _AnswerReader(Timeline(due)), self.body(prompt)
        try:
            async with self.http.stream("POST", _ROUTES[self.api], json=body) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    return Answered(answer.timeline, failure=f"{response.status_code}: {_refusal(said)}")
                async for at, data in _events(response):
                    answer.take(at, data)
        except (
            httpx2.HTTPError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            return Answered(answer.timeline, failure=f"{type(error).__name__}: {error}".rstrip(": "))
        return answer.close()


@dataclass
class _AnswerReader:
    """Reads the chunks of one answer."""

    timeline: Timeline
    counted: int = 0  # number of tokens that the server has counted
    prompt_tokens: int = 0
    texts: list[float] = field(default_factory=list)  # times of chunks with text
    by_chunk: bool = False
    ended: bool = False
    failure: str = ""

    def take(self, at: float, data: str) -> None:
        if data == "[DONE]":
            self.ended = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            self.failure = self.failure or f"in the stream: {_refusal(data)}"
        choices = chunk.get("choices") or ()
        if any(_says(choice) for choice in choices):
            self.texts.append(at)
        self.ended = self.ended or any(choice.get("finish_reason") for choice in choices)
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
            # Usage beside an unfinished choice is the usage so far.
            self.by_chunk = self.by_chunk or any(not choice.get("finish_reason") for choice in choices)
            tokens = usage.get("completion_tokens") or 0
            if self.by_chunk:
                self.timeline.add(at, tokens - self.counted)
            self.counted = tokens

    def close(self) -> Answered:
        """Spread tokens that no chunk counted evenly over the chunks; without any count each chunk is one."""
        chunks = len(self.texts)
        if not self.by_chunk:
            tokens = self.counted or chunks
            for i, at in enumerate(self.texts):
                self.timeline.add(at, (i + 1) * tokens // chunks - i * tokens // chunks)
        # A single chunk has all tokens, by any count.
        counts = "none" if not self.counted else "chunks" if self.by_chunk or chunks < 2 else "answers"
        failure = self.failure or ("" if self.ended else "the stream ended before the answer did")
        return Answered(self.timeline, self.prompt_tokens, counts, failure)


def _says(choice: JsonMapping) -> bool:
    said = choice.get("delta") or choice
    return any(said.get(name) for name in ("text", "content", "reasoning", "reasoning_content", "tool_calls"))


async def _events(response: httpx2.Response) -> AsyncIterator[tuple[float, str]]:
    """The data of server-sent events, with their times. Lines end with LF: JSON may hold other line ends."""
    rest = b""
    async for piece in response.aiter_bytes():
        at = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[len(b"data:") :].strip().decode()


def _refusal(text: str) -> str:
    """The message of an error, in any form that servers use."""
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or text
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(text).split())[:_REFUSAL_CHARACTERS]


def address(url: str) -> str:
    """The server's address without a closing /v1. Raises ConfigError unless it is an http(s) URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port, httpx2.URL(url)  # each refuses addresses that the other takes
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    except (ValueError, httpx2.InvalidURL):
        good = False
    if not good:
        raise ConfigError(f"{url!r:.200} is no address of a server; write http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


async def connect(
    http: httpx2.AsyncClient, api: Api, model: str | None, fields: JsonMapping, prompt: TrafficPrompt
) -> Endpoint:
    """Find the model's name if none is given, and the place of token counts, by a request for one token.

    Raises MtpJaxError if there is no server, or it refuses such requests.
    """
    named = {"model": model or await _model(http), **fields}
    # A short prompt, so that a prompt too long for the server is a failure of its own request only.
    ids = [token for token in prompt if isinstance(token, int)][:1]
    short: TrafficPrompt = ids or "Hello"
    for counts in get_args(Counting):  # each requests fewer counts
        one = await Endpoint(http, api, named | {"max_tokens": 1}, counts).ask(short, time.perf_counter())
        if not one.failure:
            return Endpoint(http, api, named, counts, await _mark(http))
        if not one.failure.startswith(("400", "422")):
            break
    raise MtpJaxError(f"{http.base_url} refuses what would be measured: {one.failure}")


async def _mark(http: httpx2.AsyncClient) -> str:
    try:
        return str((await http.get("/version")).json().get("system_fingerprint", ""))
    except (httpx2.HTTPError, ValueError, AttributeError, RecursionError):
        return ""


async def _model(http: httpx2.AsyncClient) -> str:
    try:
        response = await http.get("/v1/models")
    except httpx2.TransportError as error:
        raise MtpJaxError(
            f"no server answers at {http.base_url}: {type(error).__name__}; start it, or give its address"
        ) from error
    if response.status_code != 200:
        refused = f"{response.status_code}, {_refusal(response.text)}"
        raise MtpJaxError(f"{http.base_url} does not list its models: {refused}; give --model NAME")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise MtpJaxError(f"{http.base_url} lists no model; give --model NAME") from None


@dataclass(frozen=True)
class DraftCounts:
    """Counts of a server's drafts, under vLLM's names.

    Attributes:
        rows: number of (row, step) pairs that verified drafts.
        drafts, accepted: number of tokens.
        positions: accepted drafts by position.
        forced: the acceptance length that the server forces, as mtp-jax says it; 0: the model decides.
    """

    rows: int
    drafts: int
    accepted: int
    positions: tuple[int, ...]
    forced: float = 0.0

    def since(self, before: "DraftCounts") -> "DraftCounts | None":
        """The difference to earlier counts; None if there were no drafts, or the server was restarted."""
        pairs = zip(self.positions, before.positions or (0,) * len(self.positions), strict=False)
        found = DraftCounts(
            self.rows - before.rows,
            self.drafts - before.drafts,
            self.accepted - before.accepted,
            tuple(now - then for now, then in pairs),
            self.forced,
        )
        return found if found.rows > 0 and found.drafts > 0 and found.accepted >= 0 else None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that verified drafts."""
        return 1 + self.accepted / self.rows


async def drafted(http: httpx2.AsyncClient) -> DraftCounts | None:
    """The counts in a /metrics page; None where it has none of them, or no numbers."""
    try:
        response = await http.get("/metrics")
        return _counted(response.text) if response.status_code == 200 else None
    except (httpx2.HTTPError, ValueError, OverflowError):
        return None


def _counted(page: str) -> DraftCounts | None:
    """The counts of a page. Raises ValueError, OverflowError for another."""
    families = [*text_string_to_metric_families(page)]
    counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    positions: dict[int, int] = {}
    known, forced = False, 0.0
    for sample in (sample for family in families for sample in family.samples):
        prefix, _, name = sample.name.partition("vllm:spec_decode_num_")
        name = name.removesuffix("_total")
        if sample.name == "mtp_jax:synthetic_acceptance_length":
            forced = max(forced, sample.value)
        if prefix or not sample.name.endswith("_total"):
            continue
        if name in counts:  # summed over the engines behind the address
            known = True
            counts[name] += int(sample.value)
        elif name == "accepted_tokens_per_pos" and sample.labels.get("position", "").isdecimal():
            position = int(sample.labels["position"])
            positions[position] = positions.get(position, 0) + int(sample.value)
    if not known:
        return None
    by_position = tuple(positions[i] for i in sorted(positions))
    return DraftCounts(
        counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], by_position, forced
    )


async def sleep_until(due: float) -> None:
    """Sleep until this time, in seconds of ``perf_counter``."""
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
