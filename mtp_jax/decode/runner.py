"""The runner of this process's devices: the only owner of parameters, device state and compiled programs.

Invariant *flushed*: what the drafter deferred in steps without drafts is done before any other program runs,
as that may read or move it. All operations but such steps take the state from ``flushed``.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mtp_jax.decode.drafter.build import build
from mtp_jax.decode.host import Chunk, ExpertLayout, Flush, MaskMaker, PageData, Result, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, PageKey, StepKey
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.state import State, StateShape, abstract_state, bytes_per_page, empty_state
from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import moe_layers, most_copies, with_moe_layer
from mtp_jax.model.params import Params, shapes
from mtp_jax.model.sharding import data_size
from mtp_jax.model.stack import Stack, stacked


class _Flush:
    """See ``host.Flush``."""

    def __init__(self, at: float, steps: int, done: jax.Array) -> None:
        self.at, self.steps, self._done = at, steps, done

    def wait(self) -> None:
        """Returns once it has run."""
        jax.block_until_ready(self._done)


class _Pending:
    """See ``host.Pending``."""

    def __init__(self, at: float, flush: _Flush | None, *arrays: Any) -> None:
        """arrays: the fields of ``Result``, on the device."""
        self.at, self._arrays = at, arrays
        self.flush: Flush | None = flush
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()

    def read(self) -> Result:
        """The result, once it has arrived."""
        return Result(*jax.tree.map(np.asarray, self._arrays))


class _PendingPages:
    """See ``host.PendingPages``."""

    def __init__(self, parts: Sequence[tuple[int, Sequence[jax.Array]]]) -> None:
        """parts: how many pages of the arrays count, and the arrays, on the device."""
        self._parts = parts
        for array in jax.tree.leaves([arrays for _, arrays in parts]):
            array.copy_to_host_async()

    def read(self) -> PageData:
        """They, once they have arrived."""
        read = [[np.asarray(a)[:count] for a in arrays] for count, arrays in self._parts]
        return tuple(map(np.concatenate, zip(*read, strict=True)))


class _PendingExperts:
    """See ``host.PendingExperts``."""

    def __init__(self, arrays: tuple[jax.Array, jax.Array]) -> None:
        self._arrays = arrays
        for array in arrays:
            array.copy_to_host_async()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """They, once they have arrived."""
        load, over = map(np.asarray, self._arrays)
        return load, over


class LocalRunner:
    """See ``host.Runner``.

    Attributes:
        params: the model's parameters, layers alike in stacks if the backend reads them there (``take``).
        on: the backend that steps run on.
        programs: compiled for these shapes.
        state: what the device keeps; launches replace it.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        shape: StateShape,
        on: Backend,
        dtype: str = "float32",
        fp8_cache: bool = False,
        suffix_drafts: bool = False,
    ) -> None:
        """Allocates the cache; compiles nothing yet. Raises ConfigError.

        on: what steps run on. dtype: of the cache. fp8_cache: latents in e4m3 instead.
        suffix_drafts: have ``drafter.suffix.Suffix`` before the model's own drafter.
        """
        drafter = build(cfg, suffix_drafts)
        self.layout = layout_of(cfg, params, on)
        self.on, self.shards = on, data_size(on.mesh)
        self.take(params)
        groups = [len(g) if isinstance(g, Stack) else None for g in self.params.layers]
        abstract = abstract_state(cfg, drafter, shape, dtype, on.mesh, fp8_cache, self.layout, groups)
        self.programs = Programs(cfg, drafter, shapes(self.params), abstract, on)
        self._abstract, self.state = abstract, empty_state(abstract)
        self._shape = shape
        self.any_depth = on.loops
        self._deferred = 0  # steps whose work for the drafter is to be done
        self._flush: _Flush | None = None  # launched, and not yet told with a result

    def take(self, params: Params) -> None:
        """Run with these parameters from now on, of the same shapes as those before.

        Shapes alone may take their place: nothing can be launched then.
        """
        groups = (stacked(g) if len(g) > 1 else g[0] for g in self.on.arranged(params.layers))
        self.params = replace(params, layers=tuple(groups))

    # Programs

    @property
    def keys(self) -> list[Key]:
        """Everything compiled so far."""
        return self.programs.keys

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing. Raises ConfigError."""
        self.programs.compile(keys, done)

    def cover(self, need: StepKey) -> StepKey:
        """The cheapest compiled key for ``need``, at its depth. Raises ConfigError if there is none."""
        return self.programs.cover(need)

    def find(self, need: StepKey) -> StepKey | None:
        """``cover``, or None if no compiled program covers ``need``."""
        return self.programs.find(need)

    # Memory

    @property
    def page_bytes(self) -> int:
        """What a page takes, the trunk's and the drafter's part."""
        return bytes_per_page(self._abstract)

    def release_cache(self) -> None:
        """Give up the cache and everything else that slots have on the device: none may be in use."""
        self.flushed()
        self.state = self._abstract

    def allocate_cache(self) -> None:
        """Allocate it again, empty. Raises ConfigError."""
        self.state = empty_state(self._abstract)

    # Launches

    def admit(self, slot: int, row: SlotRow, page: int | None) -> None:
        """Put a request into a slot."""
        # Without cached pages it is the spare page: nothing reads what a drafter takes from there.
        page = self._shape.pages if page is None else page
        number = self._page(slot // (self._shape.slots // self.shards), page)
        self.state = self.programs.admit(self.flushed(), slot, row, number)

    def move(self, source: int, target: int) -> None:
        """Let the request of one slot go on in another."""
        self.state = self.programs.move(self.flushed(), source, target)

    def update(self, keep: np.ndarray, page_table: np.ndarray) -> None:
        """Switch off slots and renew the page table."""
        self.state = self.programs.update(self.flushed(), keep, page_table)

    def step(self, key: StepKey, chunk: Chunk | None = None, masks: MaskMaker | None = None) -> _Pending:
        """Draft and verify, prefill, or both; if structured, in two launches, and it reads the drafts."""
        at, most = time.perf_counter(), self.programs.drafter.deferral
        defers = not key.room and not key.tokens and most > 0
        state = self.state if defers and self._deferred < most else self.flushed()
        self._deferred += defers
        if not key.mode.structured:
            self.state, result = self.programs.step(key, self.params, state, chunk)
        else:
            if masks is None:
                raise ValueError(f"{key} is structured: it needs masks")
            self.state, drafts = self.programs.draft_phase(key, self.params, state, masks(None))
            allowed = masks(np.asarray(drafts.tokens))
            given = self.state, drafts, allowed, chunk
            self.state, result = self.programs.verify_phase(key, self.params, *given)
        return self._pending(at, result.packed, result.logprobs, result.prompt)

    def draft(self, key: DraftKey, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Only draft, for one slot."""
        tokens, logits = self.programs.draft(key, self.params, self.flushed(), slot)
        return np.asarray(tokens[slot]), np.asarray(logits[slot])

    def flushed(self) -> State:
        """The state, once the drafter has done what it deferred."""
        if self._deferred:
            at, steps = time.perf_counter(), self._deferred
            self.state, done = self.programs.flush(self.params, self.state)
            self._deferred, self._flush = 0, _Flush(at, steps, done)
        return self.state

    def _pending(self, at: float, *arrays: Any) -> _Pending:
        flush, self._flush = self._flush, None
        return _Pending(at, flush, *arrays)

    # Pages

    def read_pages(self, shard: int, pages: Sequence[int]) -> _PendingPages:
        """What these pages of a data shard hold now."""
        state, parts = self.flushed(), []
        for key, some in self._groups(pages):
            parts.append((len(some), self.programs.read_pages(key, state, self._numbers(key, shard, some))))
        return _PendingPages(parts)

    def write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        """Fill pages of a data shard. Raises ValueError for data of another number of pages."""
        for array in data:
            if len(array) != len(pages):
                raise ValueError(f"data of {len(array)} pages for {len(pages)} pages")
        first = 0
        for key, some in self._groups(pages):
            rest = key.pages - len(some)
            part = [a[first : first + len(some)] for a in data]
            # The spare page takes what is past the end.
            padded = [np.concatenate([a, np.zeros((rest, *a.shape[1:]), a.dtype)]) for a in part]
            numbers = self._numbers(key, shard, some)
            self.state = self.programs.write_pages(key, self.flushed(), numbers, padded)
            first += len(some)

    # Experts

    def read_experts(self) -> _PendingExperts:
        """What was counted since this was called last."""
        self.state, counts = self.programs.read_experts(self.flushed())
        return _PendingExperts(counts)

    def move_expert(self, layer: int, source: int, target: int, copies: np.ndarray) -> None:
        """Copy the expert of one slot of an MoE layer over that of another."""
        moe = self.programs.move_expert(moe_layers(self.params)[layer], source, target, copies)
        self.params = with_moe_layer(self.params, layer, moe)

    def _groups(self, pages: Sequence[int]) -> list[tuple[PageKey, Sequence[int]]]:
        """Pages in groups of the largest compiled program, the rest in the smallest that takes it."""
        sizes = sorted(k.pages for k in self.keys if isinstance(k, PageKey))
        if not sizes:
            raise ConfigError("no program reads or writes pages; compile a PageKey first")
        parts = [pages[i : i + sizes[-1]] for i in range(0, len(pages), sizes[-1])]
        return [(PageKey(next(s for s in sizes if s >= len(some))), some) for some in parts]

    def _numbers(self, key: PageKey, shard: int, pages: Sequence[int]) -> np.ndarray:
        """Counted over all shards, padded with the spare page."""
        padded = [*pages, *[self._shape.pages] * (key.pages - len(pages))]
        return np.array([self._page(shard, page) for page in padded], np.int32)

    def _page(self, shard: int, page: int) -> int:
        return shard * (self._shape.pages + 1) + page


def layout_of(cfg: ModelConfig, params: Params, on: Backend) -> ExpertLayout | None:
    """Of the experts whose choices are counted: where they can be moved, or rows take an all-to-all."""
    moes, mesh = moe_layers(params), on.mesh
    if mesh is None or not moes or (moes[0].copies is None and on.exchange is None):
        return None
    slots, domains = moes[0].down.shape[0], on.exchange.domains if on.exchange else 1
    redundant = slots - cfg.n_routed_experts
    sizes = len(moes), cfg.n_routed_experts, slots, mesh.size, domains, cfg.n_group
    return ExpertLayout(*sizes, most_copies(redundant, mesh))
