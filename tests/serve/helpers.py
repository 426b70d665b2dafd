"""Calls of a served model, and metrics without one."""

import json
import re
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import httpx2

from mtp_jax import CompletionOutput, Speculation
from mtp_jax.engine.balance import ExpertStats
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.stats import EngineStats, Histogram
from mtp_jax.store.file_tier import FileStats
from mtp_jax.store.tier import TierStats
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.metrics import Metrics

GREEDY = {"temperature": 0, "ignore_eos": True}
# A question, and the options beside it, through the `openai` package.
ASK: Any = [{"role": "user", "content": "q"}]
PLAIN: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 100}


def post(
    client: httpx2.Client, status: int = 200, path: str = "/v1/completions", **body: Any
) -> dict[str, Any]:
    response = client.post(path, json={"prompt": "abc", "max_tokens": 24, **body})
    assert response.status_code == status, response.text
    return response.json()


def events(client: httpx2.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    body = {"prompt": "abc", "max_tokens": 24, "stream": True, **body}
    if "messages" in body:
        del body["prompt"]
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def body_of(path: str, tool: dict[str, Any], forced: bool) -> dict[str, Any]:
    """A request with one tool, as a route has it."""
    if path == "/v1/chat/completions":
        choice: Any = "required" if forced else "auto"
        return {
            "messages": ASK,
            "max_tokens": 4,
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": choice,
        }
    if path == "/v1/responses":
        choice = "required" if forced else "auto"
        return {
            "input": ASK,
            "max_output_tokens": 4,
            "tools": [{"type": "function", **tool}],
            "tool_choice": choice,
        }
    renamed = {"input_schema" if key == "parameters" else key: value for key, value in tool.items()}
    return {
        "messages": ASK,
        "max_tokens": 4,
        "tools": [renamed],
        "tool_choice": {"type": "any" if forced else "auto"},
    }


NAME = re.compile(r"\b(?:vllm|mtp_jax):[a-zA-Z0-9_:]+")
STATS = EngineStats(
    slots=((9, 3, "running", 1),),
    waiting=1,
    pages_total=8,
    pages_used=2,
    pages_cached=1,
    prompt_tokens=9,
    generation_tokens=9,
    prefix_queries=9,
    hits_by_tier=Counter(device=3, host=1, file=4),
    tier=TierStats(2, 64, 3, 1, {"damaged": 1}, FileStats(96, 32, 5, 6, 7, {"foreign": 2})),
    preemptions=1,
    drafted_by_source=Counter(nextn=4, suffix=2),
    accepted_by_source=Counter(nextn=3, suffix=1),
    first_drafts=Counter(nextn=2, suffix=1),
    accepted_first_drafts=Counter(nextn=1, suffix=1),
    inter_token=Histogram.empty((0.1, 1.0)),
    accepted_per_position=[3, 1],
    depth_steps=Counter({0: 1, 2: 3}),
    step_seconds=defaultdict(float, {0: 0.1, 2: 0.4}),
    prefill_seconds=0.1,
    finished=Counter(stop=1),
    executables=4,
    realised_speedup=1.4,
    experts=ExpertStats(1, 2, 1.5, 2.0, 3),
)


def still_metrics(alarm: AcceptanceAlarm | None = None, counters: Any = ()) -> Metrics:
    """Those of an engine that does nothing more."""
    allm: Any = SimpleNamespace(
        stats=lambda: STATS,
        about=SimpleNamespace(simulated=False, engine=EngineConfig()),
        admission=SimpleNamespace(requests=1, tokens=3),
        step_age=0.1,
        hooks=SimpleNamespace(counters=counters),
        warming=False,
    )
    return Metrics(allm, "tiny", alarm or AcceptanceAlarm(0, 1))


def completion(text: str, end: str | None = None) -> CompletionOutput:
    return CompletionOutput(0, text, [], 0, end, None, [], [], Speculation(), None)
