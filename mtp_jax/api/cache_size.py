"""The size of the cache, and the slots and lengths that it has room for, where nobody gave them.

A share of the device's memory gives the cache the part that weights and programs leave. The widest step is
compiled for a small cache, since its other memory does not depend on the cache's size. A later start with
the same options finds it among the compiled programs that are kept.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from mtp_jax.api.local import make_runner, shape_of
from mtp_jax.api.memory import resident_bytes, return_free_memory
from mtp_jax.decode.bookkeeping import abstract_state, bytes_per_page
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.engine.defaults import shortened, slots, told, unasked
from mtp_jax.engine.pages import MOST_PAGES
from mtp_jax.errors import ConfigError
from mtp_jax.machine import memory_size
from mtp_jax.model.device import platform
from mtp_jax.model.narrow import is_narrow, nbytes, without_bits
from mtp_jax.model.params import Params
from mtp_jax.model.room import OVERHEAD, Room
from mtp_jax.model.sharding import data_size

POOL = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Names the share of a GPU's memory that JAX takes when it first uses the GPU; later it takes no more."""

_POOL_DEFAULT = 0.75


@dataclass(frozen=True)
class CacheSize:
    """The sizes of a cache and of its requests, and the reasons for them.

    Attributes:
        room: the memory that ``memory_fraction`` shares out; None: pages do not follow from it.
        why: one line for people.
    """

    room: Room | None
    why: str


Least = Callable[[int], int]
"""The least of a number over all hosts."""


def sized(
    decoding: Decoding,
    params: Params,
    config: EngineConfig,
    options: EngineOptions,
    structured: bool,
    least: Least = int,
    card: int | None = None,
) -> tuple[EngineConfig, CacheSize]:
    """The config with the pages of a data shard, and the slots and the length for which there is room.

    params: on their devices. options: as they were asked for; they stay. structured: whether programs for
    structured output will be compiled. card: bytes of memory of an absent device, where nothing is measured;
    None: the devices are here, or its memory is unknown. Raises ConfigError where not a single page fits, or
    the device does not tell its memory.
    """
    found, mesh = None, decoding.model.on.mesh
    if config.memory_fraction is not None:
        if card is not None:
            found = Room(card, config.memory_fraction, _bytes_on_device(params), OVERHEAD)
        else:
            found = _memory(mesh, config.memory_fraction, options.memory_fraction is not None)
        config = replace(config, memory_fraction=None)
    if found is None:
        most = None if platform() != "cpu" else partial(_half, decoding, params, config)
        config, pages = unasked(config, options, data_size(mesh), most, least)
        return config, CacheSize(None, told(config, options, decoding.model.cfg, pages))
    config = _fitting(decoding, config, options, found, least)
    config, room = _filled(decoding, params, config, found, structured, least)
    return config, CacheSize(room, told(config, options, decoding.model.cfg, str(room)))


def _half(decoding: Decoding, params: Params, config: EngineConfig) -> int:
    """Pages of a data shard that half of this computer's memory holds, without the weights.

    The other half is for programs, for files that the system keeps in memory, and for other processes. The
    memory as a whole counts, not its free part, so that each start has the same pages: programs are compiled
    for their number.
    """
    mesh = decoding.model.on.mesh
    devices = 1 if mesh is None else len(mesh.local_devices)
    left = memory_size() - nbytes(params) // jax.process_count()
    return max(left // 2 // (_page_bytes(decoding, config) * devices), 1)


def _page_bytes(decoding: Decoding, config: EngineConfig) -> int:
    return bytes_per_page(abstract_state(decoding.model, decoding.drafter, shape_of(config, 1)))


def _fitting(
    decoding: Decoding, config: EngineConfig, options: EngineOptions, found: Room, least: Least
) -> EngineConfig:
    """The config with slots and a length for which there is room, with an allowance for programs.

    The program whose need is measured has these sizes.
    """
    shards, cpu = data_size(decoding.model.on.mesh), platform() == "cpu"
    room = replace(found, programs=0.0 if cpu else OVERHEAD)
    pages = least(room.holds(_page_bytes(decoding, config)))
    if options.max_num_seqs is None and not cpu:
        config = replace(config, max_num_seqs=slots(config, pages, shards))
    return config if options.max_model_len is not None else shortened(config, pages)


def _filled(
    decoding: Decoding, params: Params, config: EngineConfig, found: Room, structured: bool, least: Least
) -> tuple[EngineConfig, Room]:
    """The config with the pages for which there is room, and the sum."""
    probe = replace(config, num_pages=config.columns)
    runner = make_runner(decoding, params, probe, allocate=False)
    page = runner.page_bytes
    rest = state_bytes(runner) - config.columns * page  # bytes of the slots, and of the spare page
    programs = found.programs or _programs(runner, probe, structured)
    room = replace(found, taken=found.taken + rest, programs=programs)
    pages = least(min(room.holds(page), MOST_PAGES))
    if not pages:
        raise ConfigError(
            f"memory_fraction = {room} leaves no room for a cache, whose pages take {page:,} bytes each; "
            "raise it, lower max_num_seqs or prefill_chunk, or spread the model over more devices"
        )
    return replace(probe, num_pages=pages), room


def _memory(mesh: Mesh | None, fraction: float, asked: bool) -> Room | None:
    """The memory of the device that has least left; None where it does not tell and nobody asked for a share.

    asked: whether the share was given; else it is at most the share that JAX takes of a GPU.
    """
    return_free_memory()
    found = allocatable(mesh)
    if found is None:
        if not asked:
            return None
        raise ConfigError(
            f"memory_fraction = {fraction:g}, but the device, {jax.local_devices()[0].device_kind}, does not "
            "say how much memory it has; give num_pages"
        )
    limit, used = found
    if platform() != "gpu":
        return Room(limit, fraction, used, 0.0)
    share = float(os.environ.get(POOL, _POOL_DEFAULT))
    if fraction > share and asked:
        raise ConfigError(
            f"memory_fraction = {fraction:g}, but JAX takes {share:g} of a GPU's memory; set "
            f"{POOL}={fraction:g} before it starts, or lower memory_fraction"
        )
    return Room(round(limit / share), min(fraction, share), used, 0.0)


def allocatable(mesh: Mesh | None = None) -> tuple[int, int] | None:
    """Bytes that JAX may allocate on a device, and of these in use, for the device that has least left.

    None: a device does not say how much memory it has; an absent device does not.
    """
    if platform() == "cpu":
        return memory_size(), resident_bytes()
    here = jax.local_devices()
    devices = here[:1] if mesh is None else [*mesh.local_devices]
    stats = [d.memory_stats() if d in here else None for d in devices]
    found = [(s["bytes_limit"], s["bytes_in_use"]) for s in stats if s and "bytes_limit" in s]
    if len(found) < len(devices):
        return None
    return min(found, key=lambda pair: pair[0] - pair[1])


def state_bytes(runner: LocalRunner) -> int:
    """Bytes on each device that a runner takes beside the parameters: its state, and rows for drafts."""
    return _bytes_on_device((runner.state, runner.params.draft_rows))


def _bytes_on_device(tree: PyTree) -> int:
    """Bytes that arrays, or their shapes, take on each device."""
    leaves = jax.tree.leaves(jax.tree.map(without_bits, tree, is_leaf=is_narrow))
    own = (a.sharding.shard_shape(a.shape) if a.sharding else a.shape for a in leaves)
    return sum(math.prod(shape) * a.dtype.itemsize for shape, a in zip(own, leaves, strict=True))


def _programs(runner: LocalRunner, config: EngineConfig, structured: bool) -> float:
    """The most that programs need: temporary memory of the widest step, and the code of all.

    On a CPU a program's code is the process memory that the compiled widest step holds, and goes on holding.
    """
    first, rest = Buckets(config, runner.shards, runner.traits).server(structured)
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
