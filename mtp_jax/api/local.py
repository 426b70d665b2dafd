"""Engines that run on the devices of this process."""

from dataclasses import fields
from pathlib import Path

from jax.sharding import Mesh

from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.decode.state import StateShape
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.validate import check_config
from mtp_jax.errors import ConfigError
from mtp_jax.heads.build import build
from mtp_jax.machine import memory_size
from mtp_jax.model.backend import Backend, backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import with_slots
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import check_divisible, data_size
from mtp_jax.model.trunk import Model


def local_engine(cfg: ModelConfig, params: Params, config: EngineConfig) -> Engine:
    """An engine on one device, without structured output. Compiles nothing yet. Raises ConfigError."""
    decoding = decoding_of(cfg, config, backend_of(config))
    runner = make_runner(decoding, with_slots(params, config.redundant_experts, None), config)
    return Engine(decoding.model.cfg, config, runner)


def backend_of(options: EngineOptions, mesh: Mesh | None = None) -> Backend:
    """The backend that the options choose. Raises ConfigError."""
    exchange, room = options.expert_exchange, options.expert_room
    return backend(options.kernels, mesh, exchange, room, options.micro_batches)


def decoding_of(cfg: ModelConfig, config: EngineConfig, on: Backend) -> Decoding:
    """The facts that the programs of an engine share; without slots for drafts there is no drafter.

    Raises ConfigError.
    """
    model = Model(cfg if config.num_speculative_tokens else cfg.without_drafts(), on)
    drafter = build(model.cfg, config.suffix_drafts, config.trees)
    _, _, *choices = fields(Decoding)
    return Decoding(model, drafter, **{f.name: getattr(config, f.name) for f in choices})


def make_runner(
    decoding: Decoding,
    params: Params,
    config: EngineConfig,
    *,
    allocate: bool = True,
    kept: Path | None = None,
    built: Path | None = None,
) -> LocalRunner:
    """A runner with the slots and pages that ``config`` says. Raises ConfigError.

    allocate: False: the cache is not allocated, and ``params`` may hold shapes alone: nothing is launched.
    kept, built: folders of kept programs, and of the programs of `mtp-jax compile`; None: there are none.
    """
    cfg, mesh = decoding.model.cfg, decoding.model.on.mesh
    check_divisible(cfg, mesh)
    shards = data_size(mesh)
    check_config(cfg, config, shards)
    shape = shape_of(config, config.pages_per_shard(shards))
    runner = LocalRunner(decoding, params, shape, allocate=allocate, kept=kept, built=built)
    _check_host_cache(config, runner.page_bytes)
    return runner


def shape_of(config: EngineConfig, pages: int) -> StateShape:
    """The state of an engine with these options, and ``pages`` pages per data shard."""
    return StateShape(
        config.max_num_seqs,
        pages,
        config.page_size,
        config.columns,
        config.dtype,
        config.kv_cache_dtype == "fp8",
        1 + config.num_speculative_tokens,
        config.return_routed_experts,
        config.suffix_store,
    )


def _check_host_cache(config: EngineConfig, page_bytes: int) -> None:
    memory = memory_size()
    if config.host_cache_bytes > memory:
        raise ConfigError(
            f"host_cache_gib = {config.host_cache_gib}, this computer has {memory / 2**30:,.1f} GiB; "
            "set it to less"
        )
    if config.host_cache_gib and config.host_cache_bytes < page_bytes:
        raise ConfigError(
            f"host_cache_gib = {config.host_cache_gib} holds no page, which takes {page_bytes / 2**30:.3g} "
            "GiB; set it to several times as much, or to 0"
        )
    if config.files and config.files.budget <= page_bytes:
        raise ConfigError(
            f"file_cache_gib = {config.file_cache_gib} holds no page, which takes {page_bytes / 2**30:.3g} "
            "GiB; set it to many times as much"
        )


def local_runner(engine: Engine) -> LocalRunner:
    """The runner of a local engine, for tools that look at its parameters, state or programs.

    Raises ConfigError for an engine that runs elsewhere.
    """
    if not isinstance(engine.runner, LocalRunner):
        raise ConfigError(
            f"the engine runs on a {type(engine.runner).__name__}; this needs a LocalRunner (local_engine), "
            "so leave out --hosts"
        )
    return engine.runner
