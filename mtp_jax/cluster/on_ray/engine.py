"""The engine of a process of a cluster, made where it runs."""

import asyncio
import os

from starlette.types import ASGIApp

from mtp_jax import LLM, AsyncLLM, Group, JsonMapping, JsonObject, make_mesh
from mtp_jax.cluster.on_ray.spec import EngineSpec
from mtp_jax.model.room import MEMORY_FRACTION
from serve.http.app import make_app
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.access_log import set_up
from serve.watch.stats_log import log_stats
from serve.watch.watchdog import Watchdog

_LOST_STATUS = 70
_LAST_ANSWERS_SECONDS = 0.5


def llm_options(options: JsonMapping) -> JsonObject:
    """Options of ``LLM`` for this process: its own mesh."""
    found = dict(options)
    if found.get("num_pages") is None:  # before JAX sees a GPU, and takes less
        share = found.get("memory_fraction", MEMORY_FRACTION)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:g}")
    if "mesh" in found:
        found["mesh"] = make_mesh(*found["mesh"])
    if found.get("compile_cache", "") is None:
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    return found


class Served:
    """A running engine and the application in front of it; it ends the process if the engine fails."""

    def __init__(self, allm: AsyncLLM, app: ASGIApp) -> None:
        """Call ``start`` instead."""
        self.allm, self.app = allm, app
        self._beside: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, spec: EngineSpec, group: Group | None = None) -> "Served":
        """Load, compile and serve, in the event loop that answers. Raises ConfigError, CheckpointError."""
        set_up(False, spec.settings.access_log)
        llm = LLM(spec.model, group=group, **llm_options(spec.options))
        allm = AsyncLLM(llm, spec.max_queued_requests, spec.max_queued_tokens)
        alarm = AcceptanceAlarm(spec.settings.acceptance_floor, spec.settings.acceptance_ceiling)
        served = cls(allm, make_app(allm, spec.settings, alarm))
        await allm.start()
        await alarm.check(allm, spec.settings.strict_draft)
        Watchdog(allm, spec.settings.step_seconds).__enter__()  # for as long as the process lives
        served._beside = [asyncio.create_task(job) for job in (served._end(), log_stats(allm, alarm))]
        return served

    async def _end(self) -> None:
        """End the process, for which its supervisor starts a new one."""
        await self.allm.failed()
        await asyncio.sleep(_LAST_ANSWERS_SECONDS)
        os._exit(_LOST_STATUS)
