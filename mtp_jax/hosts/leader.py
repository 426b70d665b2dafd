"""The runner of rank 0: writes every launch to the launch log, then launches it on its own devices."""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mtp_jax.decode.host import (
    Chunk,
    Flush,
    MaskMaker,
    PageData,
    Pending,
    PendingExperts,
    PendingPages,
    Result,
    SlotRow,
)
from mtp_jax.decode.keys import DraftKey, Key, StepKey
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.hosts.channel import Op
from mtp_jax.hosts.codec import chunk_arrays, encode_key, row_arrays
from mtp_jax.hosts.ending import Ending
from mtp_jax.hosts.leader_log import LeaderLog


class _Checked:
    """A ``host.Pending`` that ends the group if its result does not come."""

    def __init__(self, pending: Pending, ending: Ending) -> None:
        self.at, self._pending, self._ending = pending.at, pending, ending
        self.flush: Flush | None = pending.flush and _CheckedFlush(pending.flush, ending)

    def read(self) -> Result:
        """The result, once it has arrived."""
        with self._ending.on_error("a launch failed"):
            return self._pending.read()


class _CheckedFlush:
    """See ``_Checked``."""

    def __init__(self, flush: Flush, ending: Ending) -> None:
        self.at, self.steps, self._flush, self._ending = flush.at, flush.steps, flush, ending

    def wait(self) -> None:
        """Returns once it has run."""
        with self._ending.on_error("a launch failed"):
            self._flush.wait()


class _CheckedPages:
    """See ``_Checked``."""

    def __init__(self, pages: PendingPages, ending: Ending) -> None:
        self._pages, self._ending = pages, ending

    def read(self) -> PageData:
        """Their contents, once they have arrived."""
        with self._ending.on_error("a launch failed"):
            return self._pages.read()


class _CheckedExperts:
    """See ``_Checked``."""

    def __init__(self, counts: PendingExperts, ending: Ending) -> None:
        self._counts, self._ending = counts, ending

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """They, once they have arrived."""
        with self._ending.on_error("a launch failed"):
            return self._counts.read()


class LeaderRunner:
    """See ``host.Runner``. What cannot be told, or fails here, ends the group: no rank goes on alone.

    Attributes:
        local: the runner of this process's devices. Nothing may be launched on it but through this one.
    """

    def __init__(self, local: LocalRunner, log: LeaderLog, ending: Ending) -> None:
        self.local, self.shards, self.layout = local, local.shards, local.layout
        self.any_depth = local.any_depth
        self._log, self._ending = log, ending
        # What is launched, here and in the log, is in one order, whatever thread it comes from.
        self._order = threading.RLock()
        # XLA's autotuning exchanges results between processes: all compile one program after the other.
        self._compiling, self._jobs = threading.Lock(), 0

    # Programs

    @property
    def keys(self) -> list[Key]:
        """Everything that every rank has compiled."""
        return self.local.keys

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing, on every rank. Raises ConfigError."""
        with self._compiling:
            missing = [k for k in dict.fromkeys(keys) if k not in self.local.programs]
            for i, key in enumerate(missing, start=1):
                self._jobs += 1
                self._log.send(Op.COMPILE, {"job": self._jobs, "key": encode_key(key)})
                program = self.local.programs.build(key)
                self._log.compiled(self._jobs)
                with self._order:
                    self._log.send(Op.PUBLISH, {"job": self._jobs, "key": encode_key(key)})
                    self.local.programs.publish(key, program)
                if done:
                    done(i, len(missing))

    def cover(self, need: StepKey) -> StepKey:
        """The cheapest compiled key that covers ``need``. Raises ConfigError if there is none."""
        return self.local.cover(need)

    def find(self, need: StepKey) -> StepKey | None:
        """``cover``, or None if no compiled program covers ``need``."""
        return self.local.find(need)

    # Launches

    def admit(self, slot: int, row: SlotRow, page: int | None) -> None:
        """Put a request into a slot."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.ADMIT, {"slot": slot, "page": page}, row_arrays(row))
            self.local.admit(slot, row, page)

    def move(self, source: int, target: int) -> None:
        """Let the request of one slot go on in another."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.MOVE, {"source": source, "target": target})
            self.local.move(source, target)

    def update(self, keep: np.ndarray, page_table: np.ndarray) -> None:
        """Switch off slots and renew the page table."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.UPDATE, arrays=[keep, page_table])
            self.local.update(keep, page_table)

    def step(self, key: StepKey, chunk: Chunk | None = None, masks: MaskMaker | None = None) -> Pending:
        """Draft and verify, prefill, or both. Masks go to the log as they are made."""

        def told(drafts: np.ndarray | None) -> np.ndarray:
            assert masks is not None
            allowed = masks(drafts)
            self._log.send(Op.MASKS, arrays=[allowed])
            return allowed

        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.STEP, {"key": encode_key(key)}, chunk_arrays(chunk))
            return _Checked(self.local.step(key, chunk, masks and told), self._ending)

    def draft(self, key: DraftKey, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Only draft, for one slot."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.DRAFT, {"key": encode_key(key), "slot": slot})
            return self.local.draft(key, slot)

    def read_pages(self, shard: int, pages: Sequence[int]) -> PendingPages:
        """What these pages of a data shard hold."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.READ_PAGES, {"shard": shard, "pages": [int(p) for p in pages]})
            return _CheckedPages(self.local.read_pages(shard, pages), self._ending)

    def write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        """Fill pages of a data shard. Raises ValueError for data of another number of pages."""
        for array in data:
            if len(array) != len(pages):
                raise ValueError(f"data of {len(array)} pages for {len(pages)} pages")
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.WRITE_PAGES, {"shard": shard, "pages": [int(p) for p in pages]}, data)
            self.local.write_pages(shard, pages, data)

    # Experts

    def read_experts(self) -> PendingExperts:
        """What was counted since this was called last."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.READ_EXPERTS)
            return _CheckedExperts(self.local.read_experts(), self._ending)

    def move_expert(self, layer: int, source: int, target: int, copies: np.ndarray) -> None:
        """Copy the expert of one slot over that of another, on every rank."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.MOVE_EXPERT, {"layer": layer, "source": source, "target": target}, [copies])
            self.local.move_expert(layer, source, target, copies)

    # Memory

    def release_cache(self) -> None:
        """Give up the cache on every rank."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.RELEASE_CACHE)
            self.local.release_cache()

    def allocate_cache(self) -> None:
        """Allocate it again, empty."""
        with self._order, self._ending.on_error("a launch failed"):
            self._log.send(Op.ALLOCATE_CACHE)
            self.local.allocate_cache()
