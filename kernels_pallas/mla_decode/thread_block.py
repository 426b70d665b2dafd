"""A thread block of the kernel: its sizes, its references, and its share of the work."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.mosaic import WGMMA_ROWS, Ref, Warpgroup

RANK, ROPE = 512, 64
PAGE = 64  # rows
ROWS = WGMMA_ROWS
HALF = RANK // 2
COMPUTE = 2  # warpgroups; pages per step, and parts of the latents

# Lines of the integer array that describes the rows of a slot that a thread block reads.
FIRST, LENGTH, END, SEEN = range(4)


class InputRefs(NamedTuple):
    """The inputs of `mla_decode`, in the GPU's memory."""

    q: Ref
    q_rope: Ref
    pages: tuple[Ref, ...]
    table: Ref
    rows: Ref
    ahead: Ref


class Scratch(NamedTuple):
    """Shared memory of a thread block, which holds two pages, a buffer each."""

    q: Ref  # [64, 512]
    q_rope: Ref  # [64, 64]
    ahead: Ref  # [64]
    latent: Ref  # [2, 2, 64, 256], the halves of each page
    rope: Ref  # [2, 64, 64]; when scores are made, the page's probabilities
    peak: Ref  # [2, 64], peaks of scores
    decay: Ref  # [2, 64], factors of the sums before
    total: Ref  # [2, 64], sums of exponentials


class Barriers(NamedTuple):
    """Barriers of a thread block: one, one for each buffer, or one for each half, as `piece` counts them."""

    q: Ref
    latent: Ref
    rope: Ref
    latent_freed: Ref
    rope_freed: Ref
    probs: Ref
    sums: Ref


@dataclass(frozen=True)
class BlockShare:
    """The part of the work that a thread block does.

    Attributes:
        slot, split, block: its numbers.
        pages: number of pages of the slot.
        whole_from, whole_to: all tokens see the pages from the first to, not including, the second.
        start: its first step.
        steps: number of its steps.
        mine, local: its query rows among the slot's, and in shared memory, whose further rows are computed
            from the bits that it holds, and not stored.
    """

    slot: jax.Array
    split: jax.Array
    block: jax.Array
    pages: jax.Array
    whole_from: jax.Array
    whole_to: jax.Array
    start: jax.Array
    steps: jax.Array
    mine: pl.Slice | slice
    local: pl.Slice | slice


@dataclass(frozen=True)
class ThreadBlock:
    """A thread block, as its warpgroups know it.

    Attributes:
        wg: the operations of a warpgroup.
        scale: factor of the scores.
        share: its part of the work.
        given, held, barriers: its inputs, shared memory and barriers.
        out, lse: the outputs of all thread blocks; no ``out``: the place of the queries.
    """

    wg: Warpgroup
    scale: float
    share: BlockShare
    given: InputRefs
    held: Scratch
    barriers: Barriers
    out: tuple[Ref, ...]
    lse: Ref

    @property
    def fp8(self) -> bool:
        """Whether rows are FP8."""
        return len(self.given.pages) > 1


def share_of(rows: Ref, splits: int, count: int) -> BlockShare:
    """The share of the thread block that asks. count: query rows of a thread block."""
    block, split, slot = lax.axis_index("block"), lax.axis_index("split"), lax.axis_index("slot")
    pages = lax.div(rows[END, slot, block] + (PAGE - 1), PAGE)
    whole_from = lax.div(rows[FIRST, slot, block] + (PAGE - 1), PAGE)
    whole_to = lax.div(rows[LENGTH, slot, block], PAGE)
    all_steps = lax.div(pages + (COMPUTE - 1), COMPUTE)
    share = lax.div(all_steps + (splits - 1), splits)
    start = split * share
    steps = jnp.maximum(jnp.minimum(start + share, all_steps) - start, 0)
    mine, local = pl.ds(block * count, count), pl.ds(0, count)
    return BlockShare(slot, split, block, pages, whole_from, whole_to, start, steps, mine, local)


def piece(buffer: int, half: int) -> int:
    """The index of a half of a page among the barriers of both halves."""
    return buffer * COMPUTE + half
