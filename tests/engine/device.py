"""Engines on a simulated device that keeps a log: the engine's host side alone."""

from collections.abc import Callable
from typing import Any

from mtp_jax.decode.arrays import MaskMaker, Result
from mtp_jax.decode.keys import COUNT
from mtp_jax.decode.launches import Launch, StepLaunch
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.language import Language
from mtp_jax.simulate.memory import SlotMemory
from mtp_jax.text.grammar import Grammars
from tests.models import TINY, engine_config


class Device(Simulated):
    """Logs when a step is launched, and when its result is read."""

    def __init__(self, config: EngineConfig, language: Language | None = None, shards: int = 1) -> None:
        language = language or Language(TINY.vocab_size, (0.5,) * config.num_speculative_tokens)
        pages = config.pages_per_shard(shards)
        memory = SlotMemory(config.max_num_seqs, pages, config.page_size, shards)
        super().__init__(language, memory, margins=config.adaptive_verification)
        self.log: list[str] = []

    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        read = super()._launch(launch, masks)
        if not isinstance(launch, StepLaunch):
            return read
        filled = launch.chunk is not None and launch.chunk.count.any()
        windows = read().packed[: launch.key.slots, launch.key.room + 1 :]
        kind = "mixed" if windows[:, COUNT].any() and filled else "prefill" if filled else "step"
        name = f"{kind} {self.launched - 1}"
        self.log.append(f"launch {name}")
        return lambda: self.read(name, read)

    def read(self, name: str, read: Callable[[], Result]) -> Result:
        self.log.append(f"read {name}")
        return read()


def on_device(
    seed: int = 0,
    stop: float = 0.0,
    keep: float = 0.5,
    shards: int = 1,
    grammars: Grammars | None = None,
    **config: Any,
) -> tuple[Engine, Device]:
    """An engine of ``make_engine``'s sizes. stop: how often a text ends; keep: how often a draft is right."""
    sizes = engine_config(**config)
    rates = (keep,) * sizes.num_speculative_tokens
    language = Language(TINY.vocab_size, rates, seed, ends=TINY.eos_token_ids, end_rate=stop)
    device = Device(sizes, language, shards)
    return Engine(TINY, sizes, device, grammars), device
