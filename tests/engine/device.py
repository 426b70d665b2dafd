"""A stand-in for the compiled programs that only keeps count: the engine's host side without a model.

It checks what every launch promises: that the rows it writes lie inside the page table it was compiled for,
that committed rows lie in pages the request holds, and that work for the drafter is deferred by steps without
drafts alone, and by no more of them than there is room for.
"""

import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtp_jax.decode.compiled import Executables
from mtp_jax.decode.keys import EXTRA_COLUMNS, Finish, PrefillKey, StepKey
from mtp_jax.decode.prefill import Chunk, PrefillResult
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import Slots
from mtp_jax.engine.engine import Engine


class Late:
    """A result on its way to the host; the log says when it was asked for and when it was read."""

    def __init__(self, device: "Device", name: str, value: np.ndarray) -> None:
        self.device, self.name, self.value = device, name, value

    def copy_to_host_async(self) -> None:
        self.device.log.append(f"copy {self.name}")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.device.log.append(f"read {self.name}")
        return self.value


class Device:
    """Slots that emit tokens. ``stop``: chance that a token ends its row; ``keep``: that a draft holds."""

    def __init__(self, engine: Engine, seed: int = 0, stop: float = 0.0, keep: float = 0.5) -> None:
        self.random = random.Random(seed)
        self.stop, self.keep = stop, keep
        self.size, self.pages, self.shards = engine.config.page_size, engine.pages, engine.shards
        self.rows: dict[int, SimpleNamespace] = {}
        self.log: list[str] = []
        self.launches = 0
        self.deferred = 0
        self._compiled: dict[Any, None] = {}
        self._covering: dict[Any, Any] = {}
        self._lock = threading.Lock()
        engine.executables = self  # type: ignore[assignment]
        self.deferral = engine.drafter.deferral
        engine.state = None  # type: ignore[assignment]  # whatever the host wanted from it would fail

    cover, find = Executables.cover, Executables.find

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, keys: Any, done: Any = None) -> None:
        self._compiled |= dict.fromkeys(keys)
        self._covering.clear()

    def admit(self, state: Any, slot: int, row: Slots, page: int) -> Any:
        assert not self.deferred
        remaining, depth = int(row.remaining[0]), int(row.depth[0])
        self.rows[slot] = SimpleNamespace(active=False, remaining=remaining, depth=depth, length=None)
        self._hold(slot, row.page_table[0])
        return state

    def move(self, state: Any, source: int, target: int) -> Any:
        assert not self.deferred
        self.rows[target] = self.rows.pop(source)
        return state

    def _hold(self, slot: int, table: Any) -> None:
        self.rows[slot].held = int((np.asarray(table) < self.pages).sum()) * self.size

    def flush(self, params: Any, state: Any) -> Any:
        assert self.deferred, "there is something to flush"
        self.log.append("flush")
        self.deferred = 0
        return state

    def update(self, state: Any, keep: np.ndarray, page_table: np.ndarray) -> Any:
        assert not self.deferred
        for slot, row in self.rows.items():
            row.active &= bool(keep[slot])
            self._hold(slot, page_table[slot])
        return state

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

    def _result(self, name: str, emitted: list[tuple[list[int], Finish]], width: int) -> StepResult:
        packed = np.full((len(emitted), width + EXTRA_COLUMNS), -1, np.int32)
        for i, (tokens, finish) in enumerate(emitted):
            packed[i, : len(tokens)] = tokens
            packed[i, width:] = [len(tokens), max(len(tokens) - 1, 0), width - 1, finish]
        late: Any = Late(self, f"{name} {self.launches}", packed)
        self.log.append(f"launch {name} {self.launches}")
        self.launches += 1
        return StepResult(late, None)

    def prefill(self, key: PrefillKey, params: Any, state: Any, chunk: Chunk) -> tuple[Any, PrefillResult]:
        assert not self.deferred
        emitted = []
        for g, slot in enumerate(np.asarray(chunk.slot)):
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
        return state, PrefillResult(self._result("prefill", emitted, 1), None)

    def step(self, key: StepKey, params: Any, state: Any) -> tuple[Any, StepResult]:
        assert self.deferred < self.deferral if not key.depth else not self.deferred
        self.deferred += not key.depth
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
        return state, self._result("step", emitted, key.depth + 1)
