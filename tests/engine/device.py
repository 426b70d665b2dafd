"""A runner without a model that only keeps count: the engine's host side alone.

It checks what every launch promises: that the rows it writes lie inside the page table it was compiled for,
and that committed rows lie in pages the request holds.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtp_jax.decode.host import (
    Chunk,
    ExpertLayout,
    Flush,
    MaskMaker,
    PageData,
    PendingExperts,
    PendingPages,
    Result,
    SlotRow,
)
from mtp_jax.decode.keys import EXTRA_COLUMNS, DraftKey, Finish, Key, Source, StepKey
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from tests.models import TINY, engine_config


class Late:
    """A result on its way to the host; the log says when it was asked for and when it was read."""

    def __init__(self, device: "Device", name: str, packed: np.ndarray) -> None:
        self.device, self.name, self.packed = device, name, packed
        self.at, self.flush = time.perf_counter(), device.flush
        device.flush = None
        device.log.append(f"launch {name}")

    def read(self) -> Result:
        self.device.log.append(f"read {self.name}")
        return Result(self.packed)


class Device:
    """Slots that emit tokens. ``stop``: chance that a token ends its row; ``keep``: that a draft holds.

    Attributes:
        flush: comes with the next launch.
    """

    def __init__(
        self, config: EngineConfig, seed: int = 0, stop: float = 0.0, keep: float = 0.5, shards: int = 1
    ) -> None:
        self.random = random.Random(seed)
        self.stop, self.keep = stop, keep
        self.layout: ExpertLayout | None = None
        self.any_depth = False
        self.shards, self.size, self.pages = shards, config.page_size, config.pages_per_shard(shards)
        self.flush: Flush | None = None
        self.rows: dict[int, SimpleNamespace] = {}
        self.log: list[str] = []
        self.launches = 0
        self._compiled: dict[Key, None] = {}
        self._covering: dict[Key, Any] = {}

    @property
    def keys(self) -> list[Key]:
        return list(self._compiled)

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        self._compiled |= dict.fromkeys(keys)
        self._covering.clear()

    def find(self, need: StepKey) -> StepKey | None:
        if need not in self._covering:
            able = [k for k in self._compiled if isinstance(k, StepKey) and k.covers(need)]
            self._covering[need] = min(able, key=lambda k: k.cost, default=None)
        return self._covering[need]

    def cover(self, need: StepKey) -> StepKey:
        found = self.find(need)
        if found is None:
            raise ConfigError(f"no program covers {need}")
        return found

    def admit(self, slot: int, row: SlotRow, page: int | None) -> None:
        remaining, depth = int(row.remaining[0]), int(row.depth[0])
        self.rows[slot] = SimpleNamespace(active=False, remaining=remaining, depth=depth, length=None)
        self._hold(slot, row.page_table[0])

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows.pop(source)

    def _hold(self, slot: int, table: np.ndarray) -> None:
        self.rows[slot].held = int((table < self.pages).sum()) * self.size

    def update(self, keep: np.ndarray, page_table: np.ndarray) -> None:
        for slot, row in self.rows.items():
            row.active &= bool(keep[slot])
            self._hold(slot, page_table[slot])

    def _emit(self, row: SimpleNamespace, width: int) -> tuple[list[int], Finish]:
        """Up to ``width`` tokens of an active row, cut as the device cuts them."""
        tokens: list[int] = []
        finish = Finish.RUNNING
        for i in range(min(width, row.remaining)):
            if i and self.random.random() > self.keep:
                break
            tokens.append(7)
            if self.random.random() < self.stop:
                finish = Finish.STOP
                break
        row.remaining -= len(tokens)
        if finish is Finish.RUNNING and not row.remaining:
            finish = Finish.LENGTH
        row.active = finish is Finish.RUNNING
        return tokens, finish

    def step(self, key: StepKey, chunk: Chunk | None = None, masks: MaskMaker | None = None) -> Late:
        assert not key.mode.structured
        assert (chunk is None) == (not key.tokens)
        emitted = [self._window(key, slot) for slot in range(key.slots)]
        if chunk is not None:
            assert 1 <= len(chunk.slot) == key.prompts * self.shards
            emitted += [self._prefill(key, chunk, g) for g in range(len(chunk.slot))]
        width = key.depth + 1
        packed = np.full((len(emitted), width + EXTRA_COLUMNS), -1, np.int32)
        for i, (tokens, finish) in enumerate(emitted):
            drafted = key.depth if i < key.slots else 0
            packed[i, : len(tokens)] = tokens
            packed[i, width:] = [len(tokens), max(len(tokens) - 1, 0), drafted, finish, Source.NEXTN]
        stepped = any(tokens for tokens, _ in emitted[: key.slots])
        filled = chunk is not None and chunk.count.any()
        name = "mixed" if stepped and filled else "prefill" if filled else "step"
        late = Late(self, f"{name} {self.launches}", packed)
        self.launches += 1
        return late

    def _window(self, key: StepKey, slot: int) -> tuple[list[int], Finish]:
        row = self.rows.get(slot)
        if row is None or not row.active:
            return [], Finish.RUNNING
        window = row.length + key.depth + 1
        assert window <= key.pages * self.size, f"{window} rows in {key.pages} pages of {self.size}"
        tokens, finish = self._emit(row, min(row.depth, key.depth) + 1)
        row.length += len(tokens)
        assert row.length <= min(key.pages * self.size, row.held)
        return tokens, finish

    def _prefill(self, key: StepKey, chunk: Chunk, g: int) -> tuple[list[int], Finish]:
        tokens, finish, count = [], Finish.RUNNING, int(chunk.count[g])
        if count:
            row, begin = self.rows[int(chunk.slot[g])], int(chunk.start[g])
            if row.length is None:
                assert begin % self.size == 0, "a prompt begins after whole cached pages"
                row.length = begin
            assert begin == row.length, "a chunk begins where the last one ended"
            assert count <= key.tokens
            row.length += count
            assert row.length <= min(key.pages * self.size, row.held)
            if chunk.final[g] and chunk.follows[g] >= 0:
                row.active = True
            elif chunk.final[g]:
                tokens, finish = self._emit(row, 1)
        return tokens, finish

    def draft(self, key: DraftKey, slot: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def read_pages(self, shard: int, pages: Sequence[int]) -> PendingPages:
        raise NotImplementedError

    def write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        raise NotImplementedError

    def read_experts(self) -> PendingExperts:
        raise NotImplementedError

    def move_expert(self, layer: int, source: int, target: int, copies: np.ndarray) -> None:
        raise NotImplementedError

    def release_cache(self) -> None:
        raise NotImplementedError

    def allocate_cache(self) -> None:
        raise NotImplementedError


def on_device(
    seed: int = 0, stop: float = 0.0, keep: float = 0.5, shards: int = 1, **config: Any
) -> tuple[Engine, Device]:
    """An engine of ``make_engine``'s sizes that runs on a ``Device``."""
    sizes = engine_config(**config)
    device = Device(sizes, seed, stop, keep, shards)
    return Engine(TINY, sizes, device), device
