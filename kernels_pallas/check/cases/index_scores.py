"""The shapes index_scores is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Operation, Work
from kernels_pallas.index_scores import reference
from kernels_pallas.index_scores.api import SPLIT_COST, index_scores
from kernels_pallas.index_scores.index_rows import pack
from kernels_pallas.index_scores.mosaic_gpu import DIM, MOST_COLUMNS, TILE
from kernels_pallas.splits import choose_splits
from kernels_pallas.visible import Window, chain


@dataclass(frozen=True)
class ScoresShape:
    """Slots with ``lengths`` rows before their windows of ``window`` tokens; one of negative length is idle.

    Attributes:
        window, lengths: shape of the tokens.
        heads: index heads.
        page: number of rows per page.
        spare: number of pages of each slot beyond its need.
        splits: argument of the kernel.
        nextn: whether tokens see every other draft, and not the first two rows.
        fp8: whether keys are in FP8.
    """

    window: int
    lengths: tuple[int, ...]
    heads: int = 64
    page: int = 64
    spare: int = 0
    splits: int | None = None
    nextn: bool = False
    fp8: bool = False

    @property
    def columns(self) -> int:
        """Pages of each slot."""
        return -(-(max(self.lengths) + self.window) // self.page) + self.spare


def shapes() -> dict[str, ScoresShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-window": ScoresShape(4, (60, 130, -1), 16, splits=2),
        "small-ring": ScoresShape(1, (900,), 8, splits=1, spare=3),
        "small-groups": ScoresShape(5, (70,), 64, splits=2),
        "small-pages8": ScoresShape(2, (90, 13), 16, page=8, splits=2),
        "small-pages128": ScoresShape(2, (190, 13), 16, page=128, splits=2),
        "small-nextn": ScoresShape(3, (3, 66), 8, nextn=True, splits=1),
        "small-fp8": ScoresShape(2, (150, 61), 16, fp8=True, splits=2),
        "small-fp8-pages32": ScoresShape(3, (70, -1), 8, page=32, spare=1, fp8=True, splits=1),
        # DeepSeek-V3.2: a step of 40 slots, of one with a long context; a chunk of a prompt. GLM-5's heads.
        "window4-batch40-12k": ScoresShape(4, (12284,) * 40),
        "window4-batch1-128k": ScoresShape(4, (131068,)),
        "window1-batch64-32k": ScoresShape(1, (32767,) * 64),
        "chunk2k-32k": ScoresShape(2048, (30720,)),
        "heads32-window4-batch40-12k": ScoresShape(4, (12284,) * 40, heads=32),
        "fp8-window4-batch40-12k": ScoresShape(4, (12284,) * 40, fp8=True),
        "fp8-window4-batch1-128k": ScoresShape(4, (131068,), fp8=True),
    }


def case(name: str, shape: ScoresShape) -> Case:
    """The case of one shape."""
    by_kernel: dict[str, Any] = {"implementation": "mosaic_gpu", "splits": shape.splits}
    return Case(
        name=f"index_scores/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(_run, partial(index_scores, **by_kernel)),
        reference=partial(_run, reference.index_scores),
        work=work(shape),
        plan=plan(shape),
        tolerance=1e-5,
        baselines={"xla": reference.index_scores},
    )


def _run(scores: Operation, *inputs: Any, **options: Any) -> tuple[Array, Array]:
    """The visibility of each row, and its score or 0, as a distance cannot have infinities."""
    found = scores(*inputs, **options)
    return (found > -jnp.inf).astype(jnp.float32), jnp.where(jnp.isinf(found), jnp.sign(found), found)


def inputs(shape: ScoresShape, key: jax.Array) -> CaseInputs:
    """Pages scattered over the cache, NaN in every row that no token sees and in one visible row."""
    slots, columns, keys = len(shape.lengths), shape.columns, jax.random.split(key, 4)
    count, tokens = slots * columns + 1, (slots, shape.window, shape.heads)
    q = jax.random.normal(keys[0], (*tokens, DIM), jnp.bfloat16)
    weights = jax.random.normal(keys[1], tokens)
    pages = jax.random.normal(keys[2], (count, shape.page, DIM), jnp.bfloat16)
    page_table = jax.random.permutation(keys[3], count)[:-1].reshape(slots, columns).astype(jnp.int32)
    length = jnp.array(shape.lengths, jnp.int32)
    if shape.nextn:
        every_other = jnp.full((slots, shape.window), 0b10101, jnp.int32)
        visible = Window(jnp.full_like(length, 2), length, jnp.full_like(length, shape.window), every_other)
    else:
        visible = chain(length, jnp.where(length < 0, 0, shape.window))
    hidden = ~visible.seen(columns * shape.page).at[0, 5].set(False)
    hidden = hidden.reshape(slots, columns, shape.page)
    hidden = jnp.ones((count, shape.page), bool).at[page_table].set(hidden)
    pages = jnp.where(hidden[..., None], jnp.nan, pages)
    return q, weights, pack(pages) if shape.fp8 else pages, page_table, visible


def plan(shape: ScoresShape) -> KernelPlan:
    """A thread block multiplies a share of a slot's keys with the queries of its tokens."""
    tokens = min(shape.window, MOST_COLUMNS // shape.heads)
    blocks = len(shape.lengths) * -(-shape.window // tokens)
    tiles = -(-shape.columns * shape.page // TILE)
    splits = shape.splits or choose_splits(blocks, tiles, SPLIT_COST)
    keys = TILE * -(-tiles // splits)
    moved = keys * ((DIM + 4 if shape.fp8 else 2 * DIM) + 4 * tokens) + 2 * tokens * shape.heads * DIM
    return KernelPlan(blocks * splits, moved, flops=2 * keys * tokens * shape.heads * DIM)


def work(shape: ScoresShape) -> Work:
    """The least work: products of visible rows with every head's query; rows, queries, scores moved once."""
    tokens = len(shape.lengths) * shape.window
    stored = sum(max(0, n + shape.window) for n in shape.lengths)
    visible = [max(0, n + 1 + w) for n in shape.lengths for w in range(shape.window)]
    return Work(
        flops=2 * shape.heads * DIM * sum(visible),
        bytes=stored * (DIM + 4 if shape.fp8 else 2 * DIM)
        + tokens * (shape.heads * (2 * DIM + 4) + 4 * shape.columns * shape.page),
        format="bf16",
    )
