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

from mtp_jax.decode.host import Chunk, Covering, Flush, MaskMaker, PageData, Result, SlotRow
from mtp_jax.decode.keys import EXTRA_COLUMNS, DraftKey, Finish, Key, PrefillKey, StepKey
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

    def find(self, need: Covering) -> Covering | None:
        if need not in self._covering:
            able = [k for k in self._compiled if isinstance(k, type(need)) and k.covers(need)]
            self._covering[need] = min(able, key=lambda k: k.cost, default=None)
        return self._covering[need]

    def cover(self, need: Covering) -> Covering:
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

    def _launch(self, name: str, emitted: list[tuple[list[int], Finish]], width: int) -> Late:
        packed = np.full((len(emitted), width + EXTRA_COLUMNS), -1, np.int32)
        for i, (tokens, finish) in enumerate(emitted):
            packed[i, : len(tokens)] = tokens
            packed[i, width:] = [len(tokens), max(len(tokens) - 1, 0), width - 1, finish]
        late = Late(self, f"{name} {self.launches}", packed)
        self.launches += 1
        return late

    def prefill(self, key: PrefillKey, chunk: Chunk) -> Late:
        emitted = []
        for g, slot in enumerate(chunk.slot):
            tokens, finish = [], Finish.RUNNING
            count = int(chunk.count[g])
            if count:
                row = self.rows[int(slot)]
                begin = int(chunk.start[g])
                if row.length is None:
                    assert begin % self.size == 0, "a prompt begins after whole cached pages"
                    row.length = begin
                assert begin == row.length, "a chunk begins where the last one ended"
                assert count <= key.tokens
                assert 1 <= len(chunk.slot) == key.prompts * self.shards
                row.length += count
                assert row.length <= min(key.pages * self.size, row.held)
                if chunk.final[g] and chunk.follows[g] >= 0:
                    row.active = True
                elif chunk.final[g]:
                    tokens, finish = self._emit(row, 1)
            emitted.append((tokens, finish))
        return self._launch("prefill", emitted, 1)

    def step(self, key: StepKey, masks: MaskMaker | None = None) -> Late:
        assert not key.mode.structured
        emitted: list[tuple[list[int], Finish]] = []
        for slot in range(key.slots):
            row = self.rows.get(slot)
            if row is None or not row.active:
                emitted.append(([], Finish.RUNNING))
                continue
            window = row.length + key.depth + 1
            assert window <= key.pages * self.size, f"{window} rows in {key.pages} pages of {self.size}"
            tokens, finish = self._emit(row, min(row.depth, key.depth) + 1)
            row.length += len(tokens)
            assert row.length <= min(key.pages * self.size, row.held)
            emitted.append((tokens, finish))
        return self._launch("step", emitted, key.depth + 1)

    def draft(self, key: DraftKey, slot: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def read_pages(self, shard: int, pages: Sequence[int]) -> PageData:
        raise NotImplementedError

    def write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        raise NotImplementedError


def on_device(
    seed: int = 0, stop: float = 0.0, keep: float = 0.5, shards: int = 1, **config: Any
) -> tuple[Engine, Device]:
    """An engine of ``make_engine``'s sizes that runs on a ``Device``."""
    sizes = engine_config(**config)
    device = Device(sizes, seed, stop, keep, shards)
    return Engine(TINY, sizes, device), device
