"""The shapes mla_low_rank is checked, compiled and timed at."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, Work
from kernels_pallas.mla_low_rank.api import mla_low_rank
from kernels_pallas.mla_low_rank.mosaic_gpu import RANK, ROPE

ROW = RANK + ROPE


@dataclass(frozen=True)
class LowRankShape:
    """A window of tokens after each slot's ``lengths`` rows; a slot of negative length is idle.

    Attributes:
        window, lengths: shape of the tokens.
        q_parts, kv_parts: number of float32 parts to be summed; 0: the projection's result is bfloat16.
        q_rank: width of the queries' low rank.
        page: number of rows per page.
        columns: number of pages per slot.
        written: whether rows go to the cache; otherwise they are returned.
        interleaved: whether pairs of the key's dimensions are neighbours.
        rows: number of rows of the projections' results, of which the tokens' come first; None: one for each
            token.
    """

    window: int
    lengths: tuple[int, ...]
    q_parts: int = 0
    kv_parts: int = 0
    q_rank: int = 1536
    page: int = 64
    columns: int = 1
    written: bool = True
    interleaved: bool = True
    rows: int | None = None


def shapes() -> dict[str, LowRankShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-page-edges": LowRankShape(3, (0, 6, -1, 15), 2, 3, q_rank=512, page=8, columns=2),
        "small-halves": LowRankShape(
            1, (3, -1, 5), q_rank=1024, page=4, columns=2, interleaved=False, rows=8
        ),
        "small-rows": LowRankShape(2, (0, -1), 1, 2, q_rank=512, written=False),
        # DeepSeek-V3's dimensions: steps of 128 slots, of 16 and of 1; a chunk of a prompt; unwritten rows.
        "window4-batch128": LowRankShape(4, (32,) * 128, 2, 7),
        "window4-batch16": LowRankShape(4, (32,) * 16, 8, 14),
        "window1-batch1": LowRankShape(1, (32,), 8, 14, rows=64),
        "chunk4k": LowRankShape(4096, (0,), columns=64),
        "window4-batch128-rows": LowRankShape(4, (32,) * 128, 2, 7, written=False),
    }


def case(name: str, shape: LowRankShape) -> Case:
    """The case of one shape."""
    run = partial(_run, shape)
    oracle = partial(run, implementation="xla")
    return Case(
        name=f"mla_low_rank/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, implementation="mosaic_gpu"),
        reference=oracle,
        work=work(shape),
        baselines={"xla": oracle},
    )


def _run(shape: LowRankShape, *inputs: Any, **options: Any) -> tuple[Array, ...]:
    """The results without padding rows."""
    low, out = mla_low_rank(*inputs, eps=1e-6, interleaved=shape.interleaved, **options)
    tokens = len(shape.lengths) * shape.window
    return low.values[:tokens], low.scale[:, :tokens], out


def inputs(shape: LowRankShape, key: jax.Array) -> CaseInputs:
    """Random inputs, scattered pages; a cache's own contents are too small to hide a row written wrongly."""
    slots, keys = len(shape.lengths), jax.random.split(key, 7)
    tokens = (slots, shape.window)

    def projected(key: jax.Array, parts: int, width: int) -> jax.Array:
        dtype, rows = jnp.float32 if parts else jnp.bfloat16, shape.rows or math.prod(tokens)
        return jax.random.normal(key, (max(parts, 1), rows, width), dtype)

    def weight(key: jax.Array, width: int) -> jax.Array:
        return jax.random.uniform(key, (width,), jnp.bfloat16, 0.5, 1.5)

    q, kv = projected(keys[0], shape.q_parts, shape.q_rank), projected(keys[1], shape.kv_parts, ROW)
    angle = jax.random.uniform(keys[2], (*tokens, ROPE // 2), maxval=6.3)
    angles = jnp.cos(angle), jnp.sin(angle)
    count = slots * shape.columns + 1
    pages = jax.random.normal(keys[3], (count, shape.page, ROW), jnp.bfloat16) * 2**-9
    page_table = jax.random.permutation(keys[4], count)[:-1].reshape(slots, shape.columns).astype(jnp.int32)
    length = jnp.array(shape.lengths, jnp.int32)[:, None]
    positions = jnp.where(length < 0, -1, length + jnp.arange(shape.window, dtype=jnp.int32))
    weights = weight(keys[5], shape.q_rank), weight(keys[6], RANK)
    return q, kv, *weights, angles, pages if shape.written else None, page_table, positions


def work(shape: LowRankShape) -> Work:
    """The least work: results of both projections read once, e4m3 values and rows written."""
    each = shape.q_rank * ((4 * shape.q_parts or 2) + 1) + ROW * ((4 * shape.kv_parts or 2) + 2)
    return Work(flops=0, bytes=len(shape.lengths) * shape.window * each, format="bf16")
