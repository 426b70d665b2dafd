"""What crosses between the host and the device, in numpy arrays, and the runner that it crosses. No jax here.

``decode/sampling.py``, ``state.py`` and ``prefill.py`` register these classes as pytrees, so that programs
take and return them with jax arrays in their fields.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from mtp_jax.decode.keys import DraftKey, Key, StepKey


@dataclass(frozen=True)
class SamplingState:
    """What each slot asks of the sampler, and what it has seen. First axis of every field: slots."""

    temperature: Float[Any, " B"]  # 0: greedy
    top_k: Int[Any, " B"]  # 0: off
    top_p: Float[Any, " B"]  # 1: off
    min_p: Float[Any, " B"]  # 0: off; relative to the most likely token
    presence: Float[Any, " B"]  # subtracted once from every token in the output
    frequency: Float[Any, " B"]  # subtracted once per occurrence in the output
    repetition: Float[Any, " B"]  # 1: off; over prompt and output
    min_tokens: Int[Any, " B"]  # no stop token before this many output tokens
    seed: UInt32[Any, " B"]
    logit_bias: Float[Any, "B V"]
    stop_mask: Bool[Any, "B V"]  # tokens that finish the row: eos and stop ids
    prompt_mask: Bool[Any, "B V"]  # tokens that occur in the prompt
    counts: Int[Any, "B V"]  # output tokens so far


@dataclass(frozen=True)
class SlotRow:
    """A request that is put into a slot, before its prompt is prefilled. First axis of every array: 1.

    Attributes:
        remaining: tokens it may still emit.
        generated: tokens it has emitted, before it was preempted.
        depth: most drafts it wants verified per step.
        suffix: whether its drafts may come from a suffix match, where the drafter has them.
        page_table: its pages in order, local to the slot's data shard; the spare last page where unallocated.
        sampling: what it asks of the sampler.
    """

    remaining: Int[Any, " B"]
    generated: Int[Any, " B"]
    depth: Int[Any, " B"]
    suffix: Bool[Any, " B"]
    page_table: Int[Any, "B n"]
    sampling: SamplingState


@dataclass(frozen=True)
class ExpertLayout:
    """Where the routed experts of the trunk lie, as far as it does not change.

    Attributes:
        layers: MoE layers.
        experts: of each layer.
        slots: of each layer, that hold experts; split evenly over devices.
        devices: that they lie on.
        domains: of devices, between which rows take an all-to-all; 1: all rows are gathered.
        groups: of experts, neighbours of which a row chooses few groups.
        width: most copies of an expert.
    """

    layers: int
    experts: int
    slots: int
    devices: int
    domains: int
    groups: int
    width: int

    @property
    def redundant(self) -> int:
        """Slots past one for each expert."""
        return self.slots - self.experts


@dataclass(frozen=True)
class Chunk:
    """A piece of each of G prompts, as many per data shard, shard by shard. Idle rows have count 0.

    Attributes:
        slot: whose prompt it is, each another's, in its row's data shard. Past the last slot for an idle row.
        start: position of the first token.
        count: tokens that count, at most T.
        final: whether the prompt ends here.
        tokens: padded to T.
        targets: the token after each, for prompt log-probabilities; -1 where there is none.
        follows: the token after a final chunk where it is known already; -1: sample and emit it.
        allowed: what grammars allow as the first token (see ``restrict``).
    """

    slot: Int[Any, " G"]
    start: Int[Any, " G"]
    count: Int[Any, " G"]
    final: Bool[Any, " G"]
    tokens: Int[Any, "G T"]
    targets: Int[Any, "G T"]
    follows: Int[Any, " G"]
    allowed: UInt32[Any, "G words"]


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of the chosen token and of the n most likely ones, at every window position."""

    chosen: Float[Any, "B W"]
    rank: Int[Any, "B W"]  # tokens at least as likely as the chosen one, itself included: 1 is best
    ids: Int[Any, "B W n"]  # most likely first, the lower id among equals
    values: Float[Any, "B W n"]


@dataclass(frozen=True)
class Result:
    """What a launch gave, on the host.

    Attributes:
        packed: int32 [B + G, W + 5] (see ``keys``): a row for each window, then for each prompt of the
            chunk, which has one token. W = 1 without windows.
        logprobs: of the emitted tokens, if the program computes them.
        prompt: of the tokens of a chunk's prompts, if it computes them.
    """

    packed: np.ndarray
    logprobs: TopLogprobs | None = None
    prompt: TopLogprobs | None = None


@runtime_checkable
class Flush(Protocol):
    """A launch that does what the drafter deferred.

    Attributes:
        at: ``time.perf_counter()`` when it began.
        steps: how many steps without drafts had deferred work.
    """

    at: float
    steps: int

    def wait(self) -> None:
        """Returns once it has run."""
        ...


@runtime_checkable
class Pending(Protocol):
    """A launched step whose result is on its way to the host.

    Attributes:
        at: ``time.perf_counter()`` when its launch began.
        flush: launched since the step before this one, and before this one; None: none was.
    """

    at: float
    flush: Flush | None

    def read(self) -> Result:
        """The result, once it has arrived."""
        ...


MaskMaker = Callable[[np.ndarray | None], np.ndarray]
"""Drafts [B, K], or None before there are any, to what grammars allow: uint32 [B, W, ceil(V / 32)]."""

PageData = tuple[np.ndarray, ...]
"""All that chosen pages hold and a sequence goes on from: the trunk's and the drafter's part, in the order of
the device's state. First axis of every array: pages."""


@runtime_checkable
class PendingPages(Protocol):
    """Contents of pages on their way to the host."""

    def read(self) -> PageData:
        """They, once they have arrived. Any thread may wait for them."""
        ...


@runtime_checkable
class PendingExperts(Protocol):
    """Counts of experts on their way to the host."""

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Once they have arrived: how often each expert was chosen, int32 [layers, experts], and launches in
        which a layer's all-to-all had no room for all rows, int32 [layers]."""
        ...


@runtime_checkable
class Runner(Protocol):
    """What an engine runs on: the only owner of parameters, device state and compiled programs.

    Arguments are keys and host arrays, so that a runner may send them to other processes, which replay them.
    Methods launch and return at once, but for ``draft``, which returns arrays. ``compile`` may run in a
    thread of its own beside the others.

    Attributes:
        shards: data shards. Slots and pages are split over them; page numbers are local to a shard.
        layout: of the experts whose choices are counted; None: nothing is counted or moved.
        any_depth: whether an executable that makes fewer drafts than it has room for takes less time.
    """

    shards: int
    layout: ExpertLayout | None
    any_depth: bool

    @property
    def keys(self) -> Sequence[Key]:
        """Everything compiled so far."""
        ...

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing; ``done(i, n)`` is called as programs are finished. Raises ConfigError."""
        ...

    def cover(self, need: StepKey) -> StepKey:
        """The cheapest compiled key for ``need``, at its depth. Raises ConfigError if there is none."""
        ...

    def find(self, need: StepKey) -> StepKey | None:
        """``cover``, or None if no compiled program covers ``need``."""
        ...

    def admit(self, slot: int, row: SlotRow, page: int | None) -> None:
        """Put a request into a slot. page: the last of the cached pages that it begins with; None: none."""
        ...

    def move(self, source: int, target: int) -> None:
        """Let the request of one slot go on in another."""
        ...

    def update(self, keep: np.ndarray, page_table: np.ndarray) -> None:
        """Switch off slots where ``keep`` [slots] is False; renew the page table, int32 [slots, n]."""
        ...

    def step(self, key: StepKey, chunk: Chunk | None = None, masks: MaskMaker | None = None) -> Pending:
        """Draft and verify, and prefill a chunk padded to the key's sizes, if it takes one.

        masks: for a structured step, which it makes wait for its drafts.
        """
        ...

    def draft(self, key: DraftKey, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Only draft, for one slot: (tokens int32 [K], logits float32 [K, V])."""
        ...

    def read_pages(self, shard: int, pages: Sequence[int]) -> PendingPages:
        """What these pages of a data shard hold now, whatever is launched next.

        They must be full and committed to mean anything.
        """
        ...

    def write_pages(self, shard: int, pages: Sequence[int], data: PageData) -> None:
        """Fill pages of a data shard, in order, with what was read of such pages.

        Raises ValueError for data of another number of pages.
        """
        ...

    def read_experts(self) -> PendingExperts:
        """What was counted since this was called last."""
        ...

    def move_expert(self, layer: int, source: int, target: int, copies: np.ndarray) -> None:
        """Copy the expert of one slot of an MoE layer over that of another.

        copies: the slots of every expert after that, then -1: int32 [experts, layout.width].
        """
        ...

    def release_cache(self) -> None:
        """Give up the cache and everything else that slots have on the device: none may be in use."""
        ...

    def allocate_cache(self) -> None:
        """Allocate it again, empty. Raises ConfigError."""
        ...
