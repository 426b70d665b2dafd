"""Bursts of requests far above what a server's queue takes: who is refused must know at once.

All requests of a burst are written to open connections in one go. Seconds run from then to the last byte of
an answer, so those of a refusal hold those of all refusals before it.
"""

import asyncio
import gc
import json
from collections.abc import Sequence
from typing import Any

from mtp_jax.bench import raw_client
from mtp_jax.bench.client import connect
from mtp_jax.bench.latency import Percentiles
from mtp_jax.bench.own_server import OwnServer, metrics, own_server
from mtp_jax.bench.raw_client import Answer
from mtp_jax.bench.report import Report
from mtp_jax.errors import ConfigError

REFUSED_WITHIN_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_PROMPT = "def read_config(path):\n"


def run(model: str, limit: int, times: int, bursts: int, max_tokens: int, options: Sequence[str]) -> Report:
    """``bursts`` of ``times`` the queue's ``limit``, one after the other. Raises ConfigError, MtpJaxError."""
    if min(limit, times, bursts, max_tokens) < 1:
        raise ConfigError("queue, times, bursts and max tokens are 1 or more")
    with own_server(model, [*options, "--max-queued-requests", str(limit)]) as server:
        answers = asyncio.run(_run(server, limit * times, bursts, max_tokens))
    return _report(model, answers, limit, times, max_tokens)


async def _run(server: OwnServer, count: int, bursts: int, max_tokens: int) -> list[list[Answer]]:
    body = {"prompt": _PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    answers = []
    async with connect(server.url, None) as http:
        await server.warm(http)
        gc.collect()
        gc.freeze()  # a look at all that this process has imported would take longer than a refusal
        for _ in range(bursts + 1):
            answers.append(await burst(server.host, server.port, body, count))
            while (await metrics(http))["vllm:num_requests_running"]:
                await asyncio.sleep(_PAUSE_SECONDS)
    return answers[1:]  # the first one finds everything cold


async def burst(host: str, port: int, body: dict[str, Any], count: int) -> list[Answer]:
    """Send the same completion request ``count`` times at once."""
    request = raw_client.post(host, port, body)
    exchanges = [await raw_client.connect(host, port) for _ in range(count)]
    for exchange in exchanges:
        exchange.send(request)
    return list(await asyncio.gather(*(e.answer for e in exchanges)))


def faults(answers: Sequence[Answer], max_tokens: int) -> list[str]:
    """What must not happen: a late refusal, an answer that is lost or not whole."""
    refused = [a for a in answers if a.status == 503]
    accepted = [a for a in answers if a.status == 200]
    found = []
    if late := [a.seconds for a in refused if a.seconds > REFUSED_WITHIN_SECONDS]:
        limit = REFUSED_WITHIN_SECONDS * 1e3
        found.append(
            f"{len(late)} refusals later than {limit:.0f} ms, the last after {max(late) * 1e3:.0f} ms"
        )
    if other := sorted({a.status for a in answers} - {200, 503}):
        found.append(f"answers lost (0), or of other statuses: {other}")
    if broken := sum(_tokens(a.body) != max_tokens for a in accepted):
        found.append(f"{broken} of {len(accepted)} answers are not whole")
    if not refused or not accepted:
        found.append(f"{len(accepted)} requests accepted, {len(refused)} refused: expected some of both")
    return found


def _tokens(body: bytes) -> int | None:
    """Of a whole answer; None of one that was cut off."""
    try:
        return json.loads(body)["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError):
        return None


def _report(
    model: str, bursts: Sequence[Sequence[Answer]], limit: int, times: int, max_tokens: int
) -> Report:
    rows, found = [], []
    for i, answers in enumerate(bursts):
        refused = [a.seconds for a in answers if a.status == 503]
        wrong = faults(answers, max_tokens)
        found += [f"burst {i}: {fault}" for fault in wrong]
        accepted = sum(a.status == 200 for a in answers)
        slowest = f"{max(refused, default=0.0) * 1e3:.1f}"
        rows.append(
            (i, len(answers), accepted, len(refused), Percentiles.of(refused).show(), slowest, len(wrong))
        )
    headers = (
        "burst",
        "requests",
        "answered",
        "refused",
        "refusal p50 / p90 / p99, ms",
        "slowest, ms",
        "faults",
    )
    note = (
        f"A queue of {limit}, {times} times as many requests at once, {max_tokens} tokens each, after one "
        "burst that is not shown. From the first byte that the client writes to the last it reads."
    )
    notes = [note, *(f"FAULT: {fault}" for fault in found)]
    figures = {
        "refusal_seconds": [[a.seconds for a in answers if a.status == 503] for answers in bursts],
        "faults": found,
    }
    return Report(f"Bursts: {model}", headers, rows, notes, figures)
