"""A log line for every ten seconds in which tokens were generated, and the acceptance alarm."""

import asyncio
import logging
import time

from mtp_jax import AsyncLLM, EngineStats
from serve.watch.acceptance import AcceptanceAlarm

_LOG = logging.getLogger(__name__)
_EVERY_SECONDS = 10.0


async def log_stats(allm: AsyncLLM, alarm: AcceptanceAlarm) -> None:
    """Log until cancelled."""
    before, at = allm.stats(), time.perf_counter()
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        after, now = allm.stats(), time.perf_counter()
        if after.generation_tokens > before.generation_tokens:
            _LOG.info("%s", describe(before, after, now - at))
        alarm.look(after)
        before, at = after, now


def describe(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """Describe the work between two snapshots."""
    prompt, generated = (
        getattr(after, name) - getattr(before, name) for name in ("prompt_tokens", "generation_tokens")
    )
    parts = [
        f"{after.running} running, {after.waiting} waiting",
        f"{generated / seconds:.0f} tokens/s, {prompt / seconds:.0f} prompt tokens/s",
        f"cache {after.pages_used / after.pages_total:.0%} in use",
    ]
    if looked := after.prefix_queries - before.prefix_queries:
        parts.append(f"prefix hits {(after.prefix_hits - before.prefix_hits) / looked:.0%}")
    if drafts := after.drafts - before.drafts:
        accepted = after.accepted_tokens - before.accepted_tokens
        parts.append(f"acceptance length {1 + accepted / drafts:.2f} where drafted")
    return "; ".join(parts)
