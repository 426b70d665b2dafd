"""The shapes mla_decode is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.check.baselines import mla_decode as baselines
from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.mla_decode import reference
from kernels_pallas.mla_decode.api import mla_decode, splits_of
from kernels_pallas.mla_decode.fp8_rows import BLOCK, pack
from kernels_pallas.mla_decode.thread_block import COMPUTE, PAGE, RANK, ROPE, ROWS
from kernels_pallas.visible import Window, chain

# DeepSeek-V3's scale without the factor for long contexts: it multiplies queries of 128 + 64 dimensions.
SCALE = 192**-0.5


@dataclass(frozen=True)
class DecodeShape:
    """One shape: slots with ``lengths`` rows before windows of ``window`` tokens, ``heads`` on one device.

    Attributes:
        counts: number of tokens of each slot's window that see rows; None: all. Other tokens get zeros if
            their whole thread block sees no row.
    """

    heads: int
    window: int
    lengths: tuple[int, ...]
    splits: int | None = None
    nextn: bool = False
    fp8: bool = False
    in_place: bool = False
    counts: tuple[int, ...] | None = None

    @property
    def pages_per_slot(self) -> int:
        """Columns of the page table: the pages of the longest slot."""
        return -(-(max(self.lengths) + self.window) // PAGE)


def shapes() -> dict[str, DecodeShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    edges = (0, 1, 63, 64, 127, 128, 129)
    ragged = tuple(1 + i * 8191 // 31 for i in range(32))
    small = {
        "small-one-token": DecodeShape(8, 1, (150,), splits=1),
        "small-edges": DecodeShape(16, 1, (*edges, -1), splits=1),
        "small-in-place": DecodeShape(24, 3, (61, 150), splits=1, in_place=True),
        "small-window": DecodeShape(16, 4, (60, 63, 126, -1), splits=2),
        "small-window8": DecodeShape(8, 8, (57, 190), splits=2),
        "small-heads128": DecodeShape(128, 1, (130, 40), splits=2),
        "small-shallow": DecodeShape(64, 4, (130, 66, 70), splits=2, counts=(1, 0, 3)),
        "small-uneven-heads": DecodeShape(24, 3, (61, 320), splits=3),
        "small-heads20": DecodeShape(20, 2, (61, 150), splits=2),
        "small-nextn": DecodeShape(8, 1, (3, 66, 130), splits=2, nextn=True),
        "small-fp8": DecodeShape(8, 1, (150,), splits=1, fp8=True),
        "small-fp8-window": DecodeShape(16, 4, (60, 63, 126, -1), splits=2, fp8=True),
    }
    real = {
        "heads128-window2-batch128-4k": DecodeShape(128, 2, (4096,) * 128),
        "heads128-window1-batch128-4k": DecodeShape(128, 1, (4096,) * 128),
        "heads128-window4-batch32-ragged8k": DecodeShape(128, 4, ragged),
        "heads128-window4-batch1-64k": DecodeShape(128, 4, (65536,)),
        "heads128-window8-batch8-4k": DecodeShape(128, 8, (4096,) * 8),
        "heads64-window3-batch16-2k": DecodeShape(64, 3, (2048,) * 16),
        "heads16-window1-batch128-4k": DecodeShape(16, 1, (4096,) * 128),
        "heads16-window4-batch128-4k": DecodeShape(16, 4, (4096,) * 128),
        "heads16-window4-batch32-ragged8k": DecodeShape(16, 4, ragged),
        "heads16-window4-batch1-32k": DecodeShape(16, 4, (32768,)),
        "heads16-window2-batch8-1k": DecodeShape(16, 2, (1024,) * 8),
        "heads20-window4-batch32-ragged8k": DecodeShape(20, 4, ragged),
        "heads24-window4-batch32-ragged8k": DecodeShape(24, 4, ragged),
        "heads8-window1-batch1-1k": DecodeShape(8, 1, (1024,)),
        "heads8-window8-batch64-16k": DecodeShape(8, 8, (16384,) * 64),
        "fp8-heads128-window2-batch128-4k": DecodeShape(128, 2, (4096,) * 128, fp8=True),
        "fp8-heads16-window4-batch128-4k": DecodeShape(16, 4, (4096,) * 128, fp8=True),
        "fp8-heads16-window4-batch1-32k": DecodeShape(16, 4, (32768,), fp8=True),
    }
    return small | real


def case(name: str, shape: DecodeShape) -> Case:
    """The case of one shape."""
    return Case(
        name=f"mla_decode/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(
            mla_decode,
            scale=SCALE,
            implementation="mosaic_gpu",
            splits=shape.splits,
            in_place=shape.in_place,
        ),
        reference=partial(reference.mla_decode, scale=SCALE),
        work=work(shape),
        plan=plan(shape),
        baselines=baselines.baselines(SCALE),
    )


def inputs(shape: DecodeShape, key: jax.Array) -> CaseInputs:
    """Pages scattered over the cache, and NaN in every row that no token sees."""
    slots, columns = len(shape.lengths), shape.pages_per_slot
    count = slots * columns + 1
    keys = jax.random.split(key, 3)
    q = jax.random.normal(keys[0], (slots, shape.window, shape.heads, RANK + ROPE), jnp.bfloat16)
    pages = jax.random.normal(keys[1], (count, PAGE, RANK + ROPE), jnp.bfloat16)
    page_table = jax.random.permutation(keys[2], count)[:-1].reshape(slots, columns).astype(jnp.int32)
    visible = rows_seen(shape)
    hidden = ~visible.seen(columns * PAGE).reshape(slots, columns, PAGE)
    hidden = jnp.ones((count, PAGE), bool).at[page_table].set(hidden)
    pages = jnp.where(hidden[..., None], jnp.nan, pages)
    q, q_rope = jnp.split(q, [RANK], axis=-1)
    return q, q_rope, pack(pages, RANK) if shape.fp8 else pages, page_table, visible


def rows_seen(shape: DecodeShape) -> Window:
    """The rows seen in a causal window; by a second NextN layer every other draft, not the first two rows."""
    length = jnp.array(shape.lengths, jnp.int32)
    if not shape.nextn:
        counts = jnp.where(length < 0, 0, shape.window) if shape.counts is None else jnp.array(shape.counts)
        return chain(length, counts)
    every_other = jnp.full((len(shape.lengths), shape.window), 0b10101, jnp.int32)
    return Window(jnp.full_like(length, 2), length, jnp.full_like(length, shape.window), every_other)


def plan(shape: DecodeShape) -> KernelPlan:
    """A thread block multiplies its query rows with a share of a slot's pages, two in a step."""
    blocks = len(shape.lengths) * -(-shape.window * shape.heads // ROWS)
    splits = shape.splits or splits_of(blocks, shape.pages_per_slot)
    pages = sum(-(-(max(n, 0) + shape.window) // PAGE) for n in shape.lengths) / len(shape.lengths)
    rows = COMPUTE * PAGE * -(-pages // (COMPUTE * splits))
    return KernelPlan(
        blocks=blocks * splits,
        asked=rows * row_bytes(shape) + 2 * ROWS * (2 * RANK + ROPE),
        flops=2 * ROWS * rows * (2 * RANK + ROPE),
    )


def row_bytes(shape: DecodeShape) -> int:
    """Bytes of a cached row."""
    return RANK + 4 * (RANK // BLOCK) + 2 * ROPE if shape.fp8 else 2 * (RANK + ROPE)


def work(shape: DecodeShape) -> Work:
    """The least work: two products over visible rows; every row, query and output moved once."""
    counts = shape.counts or (shape.window,) * len(shape.lengths)
    windows = tuple(zip(shape.lengths, counts, strict=True))
    visible = [max(0, n + 1 + w) for n, count in windows for w in range(count)]
    stored = sum(max(0, n + count) for n, count in windows if count)
    tokens = len(shape.lengths) * shape.window * shape.heads
    return Work(
        flops=2 * shape.heads * sum(visible) * (2 * RANK + ROPE),
        bytes=stored * row_bytes(shape) + 2 * tokens * (2 * RANK + ROPE),
        format="bf16",
    )
