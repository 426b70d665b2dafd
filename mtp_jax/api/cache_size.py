"""The size of the cache as a share of the device's memory: the share that weights and programs leave free.

The widest step is compiled for a small cache, since its other memory does not depend on the cache's size. A
later start with the same options finds it among the compiled programs that are kept.
"""

import math
import os
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from mtp_jax.api.local import make_runner
from mtp_jax.api.memory import resident_bytes, return_free_memory
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.errors import ConfigError
from mtp_jax.machine import memory_size
from mtp_jax.model.device import platform
from mtp_jax.model.narrow import is_narrow, without_bits
from mtp_jax.model.params import Params
from mtp_jax.model.room import Room

POOL = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Names the share of a GPU's memory that JAX takes when it first uses the GPU; later it takes no more."""

_POOL_DEFAULT = 0.75
_MOST_PAGES = 2**22  # the most that num_pages may say


def sized(
    decoding: Decoding, params: Params, config: EngineConfig, structured: bool
) -> tuple[EngineConfig, Room]:
    """The config with the pages that ``memory_fraction`` has room for, per data shard, and the sum.

    params: on their devices. structured: whether programs for structured output will be compiled.
    Raises ConfigError where not a single page fits, or the device does not tell its memory.
    """
    assert config.memory_fraction is not None
    return_free_memory()
    total, used = _memory(decoding.model.on.mesh, config.memory_fraction)
    probe = replace(config, memory_fraction=None, num_pages=config.columns)
    runner = make_runner(decoding, params, probe)
    page = runner.page_bytes
    rest = state_bytes(runner) - config.columns * page  # bytes of the slots, and of the spare page
    room = Room(total, config.memory_fraction, float(used + rest), _programs(runner, probe, structured))
    pages = min(room.holds(page), _MOST_PAGES)
    if not pages:
        raise ConfigError(
            f"memory_fraction = {room} leaves no room for a cache, whose pages take {page:,} bytes each; "
            "raise it, lower max_num_seqs or prefill_chunk, or spread the model over more devices"
        )
    return replace(probe, num_pages=pages), room


def _memory(mesh: Mesh | None, fraction: float) -> tuple[int, int]:
    """Bytes of a device, and of these in use, for the device that has least left."""
    found = allocatable(mesh)
    if found is None:
        raise ConfigError(
            f"memory_fraction = {fraction:g}, but the device, {jax.local_devices()[0].device_kind}, does not "
            "say how much memory it has; give num_pages"
        )
    limit, used = found
    if platform() != "gpu":
        return limit, used
    share = float(os.environ.get(POOL, _POOL_DEFAULT))
    if fraction > share:
        raise ConfigError(
            f"memory_fraction = {fraction:g}, but JAX takes {share:g} of a GPU's memory; set "
            f"{POOL}={fraction:g} before it starts, or lower memory_fraction"
        )
    return round(limit / share), used


def allocatable(mesh: Mesh | None = None) -> tuple[int, int] | None:
    """Bytes that JAX may allocate on a device, and of these in use, for the device that has least left.

    None: a device does not say how much memory it has.
    """
    if platform() == "cpu":
        return memory_size(), resident_bytes()
    devices = jax.local_devices()[:1] if mesh is None else [*mesh.local_devices]
    stats = [d.memory_stats() for d in devices]
    found = [(s["bytes_limit"], s["bytes_in_use"]) for s in stats if s and "bytes_limit" in s]
    if len(found) < len(devices):
        return None
    return min(found, key=lambda pair: pair[0] - pair[1])


def state_bytes(runner: LocalRunner) -> int:
    """Bytes on each device that a runner takes beside the parameters: its state, and rows for drafts."""
    rows = jax.tree.map(without_bits, runner.params.draft_rows, is_leaf=is_narrow)
    leaves = jax.tree.leaves((runner.state, rows))
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def _programs(runner: LocalRunner, config: EngineConfig, structured: bool) -> float:
    """The most that programs need: temporary memory of the widest step, and the code of all.

    On a CPU a program's code is the process memory that the compiled widest step holds, and goes on holding.
    """
    first, rest = Buckets(config, runner.shards, runner.any_depth).server(structured)
    keys = first + rest
    steps = (k for k in keys if isinstance(k, StepKey) and not k.mode.structured)
    before = resident_bytes()
    widest = max(steps, key=lambda key: key.cost)
    runner.compile([widest])
    return_free_memory()
    needs: Any = runner.programs.program(widest).memory_analysis()
    held = max(resident_bytes() - before, 0)
    code = held if platform() == "cpu" else needs.generated_code_size_in_bytes
    return float(needs.temp_size_in_bytes + len(keys) * code)
