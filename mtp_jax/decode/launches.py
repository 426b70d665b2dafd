"""The operations of a device, as data, and the runner that does them. No jax here.

A launch holds keys, numbers and host arrays. So this process's runner, a follower that reads it from the log
between hosts, or a simulated device can do it. A further operation is a class here and a case in
``LocalRunner`` and ``Simulated`` (``mtp_jax/simulate``).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from mtp_jax.decode.arrays import Chunk, ExpertLayout, MaskMaker, PageData, Result, SlotRow
from mtp_jax.decode.keys import DraftKey, Key, ScoreKey, StepKey
from mtp_jax.errors import ConfigError

T = TypeVar("T")
WeightPart = Literal["weights", "draft"]
"""A part of the parameters: the trunk's, or the drafter's."""


class Launch(Generic[T]):
    """One operation of a device, whose result is a ``T``.

    Attributes:
        writes: whether it writes to pages.
        flushes: whether it may read or move the drafter's deferred entries, which are therefore written
            before it.
        dense: whether compression cannot make its arrays smaller.
    """

    writes: ClassVar[bool] = False
    flushes: ClassVar[bool] = True
    dense: ClassVar[bool] = False


@dataclass(frozen=True)
class Admit(Launch[None]):
    """Put a request into a slot. page: the last cached page of its prefix; None without a prefix."""

    slot: int
    row: SlotRow
    page: int | None


@dataclass(frozen=True)
class Move(Launch[None]):
    """Move a request from one slot to another."""

    source: int
    target: int


@dataclass(frozen=True)
class Update(Launch[None]):
    """Switch off slots where ``keep`` is False; renew the page table."""

    keep: Bool[Any, " slots"]
    page_table: Int[Any, "slots columns"]


@dataclass(frozen=True)
class StepLaunch(Launch[Result]):
    """Draft and verify, and prefill the chunk, if any, which is padded to the key's sizes.

    A structured step needs masks, so the host waits for its drafts. A step with ``key.kept`` needs an
    estimate (see ``ranking.survival``), float32 [s, K, 2].
    """

    writes: ClassVar[bool] = True

    key: StepKey
    chunk: Chunk | None = None
    estimate: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (self.chunk is None) == bool(self.key.tokens):
            raise ValueError(f"chunk = {self.chunk!r:.80} for {self.key}")
        if (self.estimate is None) != (self.key.kept is None):
            raise ValueError(f"estimate = {self.estimate!r:.80} for {self.key}")


@dataclass(frozen=True)
class DraftLaunch(Launch[tuple[np.ndarray, np.ndarray]]):
    """Only draft, for one slot: (tokens int32 [K], logits float32 [K, V])."""

    key: DraftKey
    slot: int


@dataclass(frozen=True)
class ReadPages(Launch[PageData]):
    """Read the contents of these pages of a data shard; later launches do not change the result.

    The contents are meaningful only for full, committed pages. Any thread may wait for the result.
    """

    shard: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class WritePages(Launch[None]):
    """Fill pages of a data shard, in order, with contents that ``ReadPages`` returned.

    Raises ValueError for data of another number of pages.
    """

    writes: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    shard: int
    pages: tuple[int, ...]
    data: PageData

    def __post_init__(self) -> None:
        for array in self.data:
            if len(array) != len(self.pages):
                raise ValueError(f"data of {len(array)} pages for {len(self.pages)} pages")


@dataclass(frozen=True)
class ReadExperts(Launch[tuple[np.ndarray, np.ndarray]]):
    """Read the counts since the last such launch.

    The result: counts of rows that chose each expert, int32 [layers, experts], and launches in which a
    layer's all-to-all had no room for all rows, int32 [layers].
    """


@dataclass(frozen=True)
class ReadRouted(Launch[np.ndarray]):
    """Read the experts that the first ``rows`` tokens in these pages of a data shard chose.

    Later launches do not change the result: uint8 or uint16 [rows, layers, k]. Any thread may wait for it.
    """

    flushes: ClassVar[bool] = False

    shard: int
    pages: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class MoveExpert(Launch[None]):
    """Copy the expert in one expert slot of an MoE layer into another expert slot.

    copies: the slots that hold each expert after the copy, padded with -1.
    """

    flushes: ClassVar[bool] = False

    layer: int
    source: int
    target: int
    copies: Int[Any, "experts width"]


@dataclass(frozen=True)
class Score(Launch[Any]):
    """Pass whole sequences through the model, without the cache: ``model.scores.Positions``, of numpy arrays.

    Any thread may launch it.
    """

    flushes: ClassVar[bool] = False

    key: ScoreKey
    tokens: Int[Any, "n T"]


@dataclass(frozen=True)
class DropWeights(Launch[None]):
    """Free the trunk's weights or the drafter's. backup: keep a copy in the memory of each host."""

    part: WeightPart
    backup: bool


@dataclass(frozen=True)
class RestoreWeights(Launch[None]):
    """Put back weights that were dropped with a backup."""

    flushes: ClassVar[bool] = False

    part: WeightPart


@dataclass(frozen=True)
class PutWeights(Launch[None]):
    """Put the next rows of a dropped part's weights in place (``Weights.put``)."""

    flushes: ClassVar[bool] = False
    dense: ClassVar[bool] = True

    part: WeightPart
    begin: int
    rows: np.ndarray


@dataclass(frozen=True)
class ReleaseCache(Launch[None]):
    """Free the cache and the device's state of all slots; no slot may be in use."""


@dataclass(frozen=True)
class AllocateCache(Launch[None]):
    """Allocate the cache again, empty. Raises ConfigError."""


@dataclass(frozen=True)
class Flush:
    """A launch that does the drafter's deferred work.

    Attributes:
        at: seconds of the runner's clock when it began.
        steps: number of steps that had deferred the work.
        wait: returns once it has run.
    """

    at: float
    steps: int
    wait: Callable[[], object]


@dataclass(frozen=True)
class Pending(Generic[T]):
    """The result of a launch, on its way to the host.

    Attributes:
        at: seconds of the runner's clock when the launch began.
        read: returns the result, once it has arrived.
        flush: the flush launched between the step before and this one; None if there was none.
    """

    at: float
    read: Callable[[], T]
    flush: Flush | None = None


@dataclass(frozen=True)
class Traits:
    """Facts of a runner's device that decide about the number and the sizes of its programs.

    Attributes:
        any_depth: whether an executable that makes fewer drafts than it has room for takes less time.
        by_rows: whether time goes into rows, padding included, as on a CPU; else into launches and bytes, and
            a program that is compiled disturbs the other programs.
        any_width: whether an executable over a wide page table takes as long as one over a narrow table.
    """

    any_depth: bool = True
    by_rows: bool = True
    any_width: bool = True


ON_CPU = Traits()
UNROLLED = Traits(any_depth=False, by_rows=False, any_width=False)
"""Passes of drafts that differ: every depth has an executable of its own."""


class Runner(ABC):
    """The device of an engine: the only owner of parameters, device state and compiled programs.

    ``compile`` may run in a thread of its own beside the other methods.

    Invariant *a page leaves before it is written again*: the functions in ``before_writing`` are called
    before any launch that may write to a page which the host has taken back.

    Attributes:
        shards: data shards. Slots and pages are split over them; page numbers are local to a shard.
        layout: experts whose choices are counted; None: nothing is counted or moved.
        traits: facts of the device that decide about its programs.
        clock: returns the seconds in which launches and requests are timed: ``time.perf_counter``, unless
            the device's time is simulated.
        before_writing: functions that launch the reads which must come first.
    """

    clock: Callable[[], float] = time.perf_counter

    def __init__(self, shards: int, layout: ExpertLayout | None = None, traits: Traits = ON_CPU) -> None:
        self.shards, self.layout, self.traits = shards, layout, traits
        self.before_writing: list[Callable[[], object]] = []

    @property
    @abstractmethod
    def keys(self) -> Sequence[Key]:
        """The keys of all programs compiled so far."""

    @abstractmethod
    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile the missing programs; ``done(i, n)`` is called as they are finished. Raises ConfigError."""

    @abstractmethod
    def find(self, need: StepKey) -> StepKey | None:
        """The cheapest compiled key for ``need``, at its depth, or None if there is none."""

    def cover(self, need: StepKey) -> StepKey:
        """The cheapest compiled key for ``need``. Raises ConfigError if there is none."""
        found = self.find(need)
        if found is None:
            raise ConfigError(f"no program covers {need}; compile it first (Engine.prepare)")
        return found

    def do(self, launch: Launch[T], masks: MaskMaker | None = None) -> Pending[T]:
        """Launch, and return at once, unless a step is structured. masks: makes masks for such a step."""
        if launch.writes:
            for read in self.before_writing:
                read()
        return self._do(launch, masks)

    @abstractmethod
    def _do(self, launch: Launch[Any], masks: MaskMaker | None) -> Pending[Any]:
        """Launch one operation."""


class DeviceRunner(Runner):
    """A runner with a device of its own.

    Invariant *flushed*: work that the drafter deferred in steps without drafts is done before any other
    program runs, as that may read or move its entries.
    """

    def __init__(self, shards: int, layout: ExpertLayout | None = None, traits: Traits = ON_CPU) -> None:
        super().__init__(shards, layout, traits)
        self._deferred = 0  # depth-0 steps whose NextN entries are not written
        self._flush: Flush | None = None  # a flush whose time no result has reported yet

    @property
    @abstractmethod
    def deferral(self) -> int:
        """Steps without drafts and without a chunk whose work the drafter can defer."""

    def flushed(self) -> None:
        """Write the drafter's deferred entries."""
        if self._deferred:
            at, steps = self.clock(), self._deferred
            self._deferred, self._flush = 0, Flush(at, steps, self._launch_flush())

    def _do(self, launch: Launch[Any], masks: MaskMaker | None) -> Pending[Any]:
        at = self.clock()
        step = launch.key if isinstance(launch, StepLaunch) else None
        defers = step is not None and not step.room and not step.tokens and self.deferral > 0
        if launch.flushes and not (defers and self._deferred < self.deferral):
            self.flushed()
        read = self._launch(launch, masks)
        if defers:  # other launches may come from other threads
            self._deferred += 1
        flush = None
        if step is not None:
            flush, self._flush = self._flush, None
        return Pending(at, read, flush)

    @abstractmethod
    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        """Launch one operation; the function returns its result, once it has arrived."""

    @abstractmethod
    def _launch_flush(self) -> Callable[[], object]:
        """Launch the drafter's deferred work; the function returns once it has run."""
