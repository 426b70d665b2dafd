"""Minutes of random traffic against a server of its own: nothing may be lost, mixed up, leaked or compiled.

Poisson arrivals of random requests: a fifth have clients that disconnect, a tenth are invalid. Afterwards
greedy answers are asked for again at depth 0 and alone, and must be the same.
"""

import asyncio
import os
import random
import shlex
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2

from mtp_jax.errors import MtpJaxError
from mtp_jax.lab.bench.report import Report
from tests.soak.answers import Got, ask, faults
from tests.soak.own_server import MODEL_NAME, OwnServer, metrics, own_server
from tests.soak.requests import Asked, make, probe, texts, without_drafts

_IDLE_SECONDS = 60.0
_SAMPLE_SECONDS = 2.0
_GROWTH = 64 * 2**20
_RECHECKED_SHARE = 0.05
_CHARACTERS = 300


@dataclass
class Soak:
    """What happened so far. ``faults``: everything that must not happen, in words."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    refused: int = 0
    tokens: int = 0
    rechecked: int = 0
    preemptions: int = 0
    resident: list[int] = field(default_factory=list)
    greedy: list[tuple[Asked, Got]] = field(default_factory=list)


def run(model: str, minutes: float, rate: float, seed: int, options: Sequence[str]) -> Report:
    """Start ``mtp-jax serve`` with these options, soak it, stop it. Raises MtpJaxError if it ends before."""
    with own_server(model, options) as server:
        soak = asyncio.run(_soak(server, minutes * 60, rate, seed))
        server.process.send_signal(signal.SIGTERM)
        try:
            if (status := server.process.wait(_IDLE_SECONDS)) != 0:
                soak.faults.append(f"the server ended with status {status} after SIGTERM")
        except subprocess.TimeoutExpired:
            soak.faults.append(f"the server had not ended {_IDLE_SECONDS:.0f} s after SIGTERM")
    return _report(model, soak, minutes, rate, seed, options)


async def _soak(server: OwnServer, seconds: float, rate: float, seed: int) -> Soak:
    soak, rng = Soak(), random.Random(seed)
    pieces = texts(rng, 1000, _CHARACTERS)
    async with server.client() as http:
        await server.warm(http)
        chat = (await ask(http, probe(MODEL_NAME))).status == 200
        if not (compiled := _compilations(server.log)):
            raise MtpJaxError("the server's log shows no compilation, so late ones would not be noticed")
        sampling = asyncio.create_task(_sample(soak, server.process.pid))
        tasks: list[asyncio.Task[None]] = []
        end, due = time.monotonic() + seconds, time.monotonic()
        while due < end:
            server.check()
            asked = make(rng, lambda length: rng.choice(pieces)[:length], MODEL_NAME, chat)
            tasks.append(asyncio.create_task(_one(http, asked, soak)))
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*tasks)
        sampling.cancel()
        server.check()
        await _recheck(http, soak, rng)
        await _check_idle(http, soak)
        if late := _compilations(server.log) - compiled:
            soak.faults.append(f"{late} compilations after the warm-up")
    if not soak.preemptions:
        soak.faults.append("no request was preempted: give the server fewer pages (--serve-options)")
    if (grown := growth(soak.resident)) > _GROWTH:
        soak.faults.append(f"memory grew by {grown / 2**20:.0f} MiB")
    return soak


async def _one(http: httpx2.AsyncClient, asked: Asked, soak: Soak) -> None:
    got = await ask(http, asked)
    soak.kinds[asked.kind] += 1
    if got.status == 503:
        soak.refused += 1
        return
    soak.faults += faults(asked, got)
    soak.tokens += sum(map(len, got.choices.values()))
    if asked.greedy and got.status == 200:
        soak.greedy.append((asked, got))


async def _recheck(http: httpx2.AsyncClient, soak: Soak, rng: random.Random) -> None:
    """Greedy answers again, alone and without drafts."""
    count = min(len(soak.greedy), max(1, round(_RECHECKED_SHARE * sum(soak.kinds.values()))))
    for asked, got in rng.sample(soak.greedy, count):
        again = await ask(http, without_drafts(asked))
        soak.rechecked += 1
        if again.choices != got.choices:
            shown = asked.body[:300].decode(errors="replace")
            soak.faults.append(f"tokens {got.choices}, alone at depth 0 {again.choices}: {shown}")


async def _check_idle(http: httpx2.AsyncClient, soak: Soak) -> None:
    """Slots, pages and reservations in the queue are free again; a disconnected client may take a moment."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    held = {}
    end = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < end:
        now = await metrics(http)
        soak.preemptions = int(now["vllm:num_preemptions_total"])
        held = {n: now[n] for n in (*names, "mtp_jax:queued_requests", "mtp_jax:queued_tokens") if now[n]}
        if not held:
            return
        await asyncio.sleep(0.5)
    soak.faults.append(f"still held when idle: {held}")


async def _sample(soak: Soak, pid: int) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        status = Path(f"/proc/{pid}/status").read_text()
        soak.resident.append(int(status.partition("VmRSS:")[2].split()[0]) * 1024)


def growth(resident: Sequence[int]) -> float:
    """Bytes between the second quarter of the samples and the last, medians of each."""
    quarter = len(resident) // 4
    if not quarter:
        return 0.0
    return statistics.median(resident[-quarter:]) - statistics.median(resident[quarter : 2 * quarter])


def _compilations(log: IO[bytes]) -> int:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).count(b"Finished XLA compilation of")


def _report(model: str, soak: Soak, minutes: float, rate: float, seed: int, options: Sequence[str]) -> Report:
    rows = [
        *((f"{kind} requests", soak.kinds[kind]) for kind in ("valid", "aborted", "invalid")),
        ("refused, the queue being full", soak.refused),
        ("tokens of whole answers", soak.tokens),
        ("preemptions", soak.preemptions),
        ("asked again at depth 0", soak.rechecked),
        ("memory grew by, MiB", f"{growth(soak.resident) / 2**20:.1f}"),
        ("faults", len(soak.faults)),
    ]
    notes = [
        f"{minutes:g} minutes, {rate:g} requests/s, seed {seed}, `mtp-jax serve {shlex.join(options)}`.",
        *(f"FAULT: {fault}" for fault in soak.faults[:20]),
    ]
    figures = {
        "requests": dict(soak.kinds),
        "refused": soak.refused,
        "tokens": soak.tokens,
        "rechecked": soak.rechecked,
        "preemptions": soak.preemptions,
        "resident_bytes": soak.resident,
        "faults": soak.faults,
    }
    return Report(f"Soak: {model}", ("what", "count"), rows, notes, figures)
