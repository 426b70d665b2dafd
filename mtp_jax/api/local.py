"""Engines that run on the devices of this process."""

from jax.sharding import Mesh

from mtp_jax.decode.runner import LocalRunner
from mtp_jax.decode.state import StateShape
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.validate import check_config
from mtp_jax.errors import ConfigError
from mtp_jax.heads.build import build
from mtp_jax.machine import memory_size
from mtp_jax.model.backend import backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import with_slots
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import check_divisible, data_size, with_auto_axes
from mtp_jax.model.trunk import Model


def local_engine(cfg: ModelConfig, params: Params, config: EngineConfig) -> Engine:
    """An engine on one device, without structured output. Compiles nothing yet. Raises ConfigError."""
    return Engine(cfg, config, make_runner(cfg, params, config))


def make_runner(
    cfg: ModelConfig,
    params: Params,
    config: EngineConfig,
    mesh: Mesh | None = None,
    *,
    allocate: bool = True,
) -> LocalRunner:
    """A runner with the slots and pages that ``config`` says. Raises ConfigError.

    allocate: False: the cache is not allocated, and ``params`` may hold shapes alone: nothing is launched.
    """
    mesh = with_auto_axes(mesh)
    check_divisible(cfg, mesh)
    params = with_slots(params, config.redundant_experts, mesh)
    shards = data_size(mesh)
    check_config(cfg, config, shards)
    pages, fp8 = config.pages_per_shard(shards), config.kv_cache_dtype == "fp8"
    sizes = config.max_num_seqs, pages, config.page_size, config.columns
    shape = StateShape(*sizes, config.dtype, fp8, 1 + config.num_speculative_tokens)
    on = backend(config.kernels, mesh, config.expert_exchange, config.expert_room, config.micro_batches)
    drafter = build(cfg, config.suffix_drafts, config.trees)
    how = config.law, config.adaptive_verification
    runner = LocalRunner(Model(cfg, on), drafter, params, shape, *how, allocate=allocate)
    _check_host_cache(config, runner.page_bytes)
    return runner


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
