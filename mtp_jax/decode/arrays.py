"""Arrays that cross between the host and the device, in numpy; ``launches.py`` has the launches. No jax here.

``decode/sampling.py``, ``state.py`` and ``prefill.py`` register these classes as pytrees, so that programs
take and return them with jax arrays in their fields.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32


@dataclass(frozen=True)
class SamplingState:
    """Each slot's options of sampling, and counts of its tokens. First axis of every field: slots."""

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
    """A request's row for its slot, before its prompt is prefilled. First axis of every array: 1.

    Attributes:
        remaining: tokens that the request may still emit.
        generated: tokens that it emitted before it was preempted.
        depth: most drafts of the request that one step verifies.
        suffix: whether its drafts may come from a suffix match, where the drafter has them.
        page_table: its pages in order, local to the slot's data shard; the spare last page where unallocated.
        sampling: its options of sampling.
        texts: other requests' outputs, each followed by a negative number, which fills the rest, too; None
            where suffix matches lie in the request's own text alone.
    """

    remaining: Int[Any, " B"]
    generated: Int[Any, " B"]
    depth: Int[Any, " B"]
    suffix: Bool[Any, " B"]
    page_table: Int[Any, "B n"]
    sampling: SamplingState
    texts: Int[Any, "B N"] | None = None


@dataclass(frozen=True)
class ExpertLayout:
    """The fixed part of the routed experts' placement: numbers of layers, experts, slots and devices.

    Attributes:
        layers: number of MoE layers.
        experts: number of experts of each layer.
        slots: number of slots of each layer, which hold experts; split evenly over devices.
        devices: number of devices that they lie on.
        domains: number of groups of devices, between which rows take an all-to-all; 1: all rows are gathered.
        groups: number of groups of neighbouring experts, few of which a row chooses.
        width: number of copies that an expert has at most.
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
    """A piece of each of G prompts, the same number per data shard, shard by shard. Idle rows have count 0.

    Attributes:
        slot: the slot of each row's request, in the row's data shard; past the last slot for an idle row.
        start: position of the first token.
        count: number of real tokens, which must be T at most; the tokens behind them are padding.
        final: whether the prompt ends here.
        tokens: the tokens, padded to T.
        targets: the token after each token, for prompt log-probabilities; -1 where a request wants none.
        follows: the token after a final chunk, if a preempted request has emitted it; -1: sample and emit it.
        allowed: masks of the tokens that grammars allow as the first token (see ``restrict``).
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
    """Log-probabilities of the chosen token and of the n most likely tokens, at every window position."""

    chosen: Float[Any, "B W"]
    rank: Int[Any, "B W"]  # tokens at least as likely as the chosen one, itself included: 1 is best
    ids: Int[Any, "B W n"]  # most likely first, the lower id among equals
    values: Float[Any, "B W n"]


@dataclass(frozen=True)
class Result:
    """Results of a launch, on the host.

    Attributes:
        packed: int32 [B + G, W + 5] (see ``keys``): a row for each window, then for each prompt of the
            chunk, which has one token. W = 1 without windows.
        logprobs: log-probabilities of the emitted tokens, if the program computes them.
        prompt: log-probabilities of the tokens of a chunk's prompts, if it computes them.
        margins: margins of the windows' drafts, float32 [B, K], if it hands them on (see ``ranking``).
    """

    packed: np.ndarray
    logprobs: TopLogprobs | None = None
    prompt: TopLogprobs | None = None
    margins: np.ndarray | None = None


@runtime_checkable
class MaskMaker(Protocol):
    """Makes the masks of a step, see ``allowed`` in ``engine/structured.py``."""

    def __call__(self, drafts: np.ndarray | None, parents: np.ndarray | None = None, /) -> np.ndarray:
        """Map drafts [B, K] to the tokens allowed at each node of the window: uint32 [B, W, ceil(V / 32)].

        drafts: None before there are any. parents: [B, K] of trees; None: chains (see ``Drafts``).
        """
        ...


PageData = tuple[np.ndarray, ...]
"""Contents of some pages, enough for a sequence to go on from: the trunk's and the drafter's part, in the
order of the device's state. First axis of every array: pages."""
