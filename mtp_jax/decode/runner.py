"""The runner of this process's devices: the only owner of parameters, device state and compiled programs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtp_jax.decode import launches
from mtp_jax.decode.arrays import ExpertLayout, MaskMaker, PageData, Result, SlotRow
from mtp_jax.decode.bookkeeping import abstract_state, bytes_per_page
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import Key, PageKey, StepKey
from mtp_jax.decode.launches import DeviceRunner, Launch, Traits
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.state import StateShape
from mtp_jax.decode.weights import Weights
from mtp_jax.errors import ConfigError
from mtp_jax.model.device import platform
from mtp_jax.model.expert_slots import moe_layers, most_copies, with_moe_layer
from mtp_jax.model.head import head_of
from mtp_jax.model.params import Params, shapes
from mtp_jax.model.sharding import data_size
from mtp_jax.model.stack import Stack, stacked
from mtp_jax.model.trunk import Model


def _arriving(arrays: Any) -> None:
    """Begin to copy arrays to the host, so that a later ``np.asarray`` finds them there."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()


class LocalRunner(DeviceRunner):
    """See ``launches.Runner``.

    Attributes:
        params: the model's parameters, layers alike in stacks if the backend reads them there (``take``).
        weights: the same parameters layer by layer, and the parts of them that are dropped or replaced.
        decoding: the facts that the programs share.
        programs: the programs compiled for these shapes.
        state: the device's state; launches replace it.
    """

    def __init__(
        self,
        decoding: Decoding,
        params: Params,
        shape: StateShape,
        *,
        allocate: bool = True,
        kept: Path | None = None,
        built: Path | None = None,
    ) -> None:
        """Allocates the cache; compiles nothing else yet. Raises ConfigError.

        allocate: False: the cache stays released, and ``state`` has its shapes. kept, built: folders of kept
        programs (``KeptPrograms``).
        """
        model, on = decoding.model, decoding.model.on
        super().__init__(data_size(on.mesh), layout_of(model, params), traits_of(model))
        self.decoding, self.weights = decoding, Weights(params, on)
        self.take(params)
        groups = [len(g) if isinstance(g, Stack) else None for g in self.params.layers]
        abstract = abstract_state(model, decoding.drafter, shape, self.layout, groups)
        self.programs = Programs(decoding, shapes(self.params), abstract, kept, shapes(params), built)
        self._abstract, self.state = abstract, self.programs.empty_state() if allocate else abstract
        self._shape = shape

    def take(self, params: Params) -> None:
        """Run with these parameters from now on, of the same shapes as the old parameters.

        ``params`` may hold shapes alone; then no launch is possible.
        """
        self.weights.params = params
        params = self.decoding.read(params)
        groups = self.decoding.model.on.arranged(params.layers)
        if len(groups) < len(params.layers):
            params = replace(params, layers=tuple(stacked(g) if len(g) > 1 else g[0] for g in groups))
        self.params = params

    # Programs

    @property
    def keys(self) -> list[Key]:
        """The keys of all programs compiled so far."""
        return self.programs.keys

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile the missing programs. Raises ConfigError."""
        self.programs.compile(keys, done)

    def find(self, need: StepKey) -> StepKey | None:
        """The cheapest compiled key that covers ``need``, or None if there is none."""
        return self.programs.find(need)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the trunk's and the drafter's part."""
        return bytes_per_page(self._abstract)

    # Launches

    @property
    def deferral(self) -> int:
        """Number of steps whose work the drafter can defer."""
        return self.decoding.drafter.deferral

    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        """Launch one operation. Raises ConfigError where the cache cannot be allocated."""
        match launch:
            case launches.StepLaunch():
                return self._step(launch, masks)
            case launches.DraftLaunch(key, slot):
                tokens, logits = self.programs.draft(key, self.params, self.state, slot)
                return lambda: (np.asarray(tokens)[slot], np.asarray(logits)[slot])
            case launches.Score(key, tokens):
                scored = self.programs.score(key, self.weights.params, tokens)
                return lambda: jax.tree.map(np.asarray, scored)
            case launches.ReadPages(shard, pages):
                return self._read_pages(shard, pages)
            case launches.ReadExperts():
                self.state, counts = self.programs.read_experts(self.state)
                _arriving(counts)
                return lambda: tuple(map(np.asarray, counts))
            case launches.ReadRouted(shard, pages, rows):
                return self._read_routed(shard, pages, rows)
            case launches.Admit(slot, row, page):
                self._admit(slot, row, page)
            case launches.Move(source, target):
                self.state = self.programs.move(self.state, source, target)
            case launches.Update(keep, page_table):
                self.state = self.programs.update(self.state, keep, page_table)
            case launches.WritePages(shard, pages, data):
                self._write_pages(shard, pages, data)
            case launches.ReleaseCache():
                self.state = self._abstract
            case launches.AllocateCache():
                self.state = self.programs.empty_state()
            case _:
                self._change_params(launch)
        return lambda: None

    def _admit(self, slot: int, row: SlotRow, page: int | None) -> None:
        # Without a cached prefix this is the spare page, whose drafter state no program reads.
        page = self._shape.pages if page is None else page
        number = self._page(slot // (self._shape.slots // self.shards), page)
        self.state = self.programs.admit(self.state, slot, row, number)

    def _change_params(self, launch: Launch[Any]) -> None:
        before = self.weights.params
        match launch:
            case launches.MoveExpert(layer, source, target, copies):
                moe = self.programs.move_expert(moe_layers(self.params)[layer], source, target, copies)
                self.params = with_moe_layer(self.params, layer, moe)
            case launches.DropWeights(part, backup):
                self.weights.drop(part, backup)
            case launches.RestoreWeights(part):
                self.weights.restore(part)
            case launches.PutWeights(part, begin, rows):
                self.weights.put(part, begin, rows)
            case _:
                raise TypeError(f"{launch!r:.80} is no launch")
        if self.weights.params is not before:
            self.take(self.weights.params)

    def _step(self, launch: launches.StepLaunch, masks: MaskMaker | None) -> Callable[[], Result]:
        """Launch a step; a structured step is two launches, between which the drafts are read."""
        key, chunk = launch.key, launch.chunk
        if not key.mode.structured:
            self.state, result = self.programs.step(key, self.params, self.state, chunk, launch.estimate)
        else:
            if masks is None:
                raise ValueError(f"{key} is structured: it needs masks")
            self.state, drafts = self.programs.draft_phase(key, self.params, self.state, masks(None))
            parents = None if drafts.parents is None else np.asarray(drafts.parents)
            allowed = masks(np.asarray(drafts.tokens), parents)
            self.state, result = self.programs.verify_phase(
                key, self.params, self.state, drafts, allowed, chunk
            )
        arrays = result.packed, result.logprobs, result.prompt, result.margins
        _arriving(arrays)
        return lambda: Result(*jax.tree.map(np.asarray, arrays))

    def _launch_flush(self) -> Callable[[], object]:
        self.state, done = self.programs.flush(self.params, self.state)
        return lambda: jax.block_until_ready(done)

    # Pages

    def _read_pages(self, shard: int, pages: Sequence[int]) -> Callable[[], PageData]:
        parts = []
        for key, some in self._groups(pages):
            arrays = self.programs.read_pages(key, self.state, self._numbers(key, shard, some))
            parts.append((len(some), arrays))
        _arriving([arrays for _, arrays in parts])

        def read() -> PageData:
            found = [[np.asarray(a)[:count] for a in arrays] for count, arrays in parts]
            return tuple(map(np.concatenate, zip(*found, strict=True)))

        return read

    def _read_routed(self, shard: int, pages: Sequence[int], rows: int) -> Callable[[], np.ndarray]:
        size, cfg = self.programs.lowering.routed_pages, self.decoding.model.cfg
        groups = [pages[i : i + size] for i in range(0, len(pages), size)]
        numbers = [self._numbers(PageKey(size), shard, some) for some in groups]
        parts = [self.programs.read_routed(self.state, own) for own in numbers]
        _arriving(parts)
        shape = rows, cfg.moe_layers, cfg.num_experts_per_tok

        def read() -> np.ndarray:
            whole = np.concatenate([np.asarray(part) for part in parts])
            return whole.reshape(-1, whole.shape[-1])[:rows].reshape(shape)

        return read

    def _write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        first = 0
        for key, some in self._groups(pages):
            rest = key.pages - len(some)
            part = [a[first : first + len(some)] for a in data]
            # Padding is written to the spare page.
            padded = [np.concatenate([a, np.zeros((rest, *a.shape[1:]), a.dtype)]) for a in part]
            numbers = self._numbers(key, shard, some)
            self.state = self.programs.write_pages(key, self.state, numbers, padded)
            first += len(some)

    def _groups(self, pages: Sequence[int]) -> list[tuple[PageKey, Sequence[int]]]:
        """Pages in groups of the largest compiled program, the rest in the smallest that takes it."""
        sizes = sorted(k.pages for k in self.keys if isinstance(k, PageKey))
        if not sizes:
            raise ConfigError("no program reads or writes pages; compile a PageKey first")
        parts = [pages[i : i + sizes[-1]] for i in range(0, len(pages), sizes[-1])]
        return [(PageKey(next(s for s in sizes if s >= len(some))), some) for some in parts]

    def _numbers(self, key: PageKey, shard: int, pages: Sequence[int]) -> np.ndarray:
        """Page numbers counted over all shards, padded with the spare page."""
        padded = [*pages, *[self._shape.pages] * (key.pages - len(pages))]
        return np.array([self._page(shard, page) for page in padded], np.int32)

    def _page(self, shard: int, page: int) -> int:
        return shard * (self._shape.pages + 1) + page


def ends_with_rows(model: Model) -> bool:
    """Whether attention of the trunk, and of a head, takes time for the rows in use alone."""
    head = head_of(model.cfg)
    sizes = [model.cfg, *([head.sizes] if head and head.sizes else [])]
    return all(model.on.kind(cfg).reach(cfg) == "rows" for cfg in sizes)


def traits_of(model: Model) -> Traits:
    """Facts of the backend: the passes of several NextN layers differ, so that no loop can compute them."""
    loops = model.on.products.loops and model.cfg.num_nextn_predict_layers <= 1
    return Traits(loops, platform() == "cpu", ends_with_rows(model))


def layout_of(model: Model, params: Params) -> ExpertLayout | None:
    """The experts whose choices are counted, as they can be moved or rows take an all-to-all; else None."""
    cfg, on = model.cfg, model.on
    moes, mesh = moe_layers(params), on.mesh
    if mesh is None or not moes or (moes[0].copies is None and on.experts.exchange is None):
        return None
    slots, domains = moes[0].down.shape[0], on.experts.exchange.domains if on.experts.exchange else 1
    return ExpertLayout(
        layers=len(moes),
        experts=cfg.n_routed_experts,
        slots=slots,
        devices=mesh.size,
        domains=domains,
        groups=cfg.n_group,
        width=most_copies(slots - cfg.n_routed_experts, mesh),
    )
