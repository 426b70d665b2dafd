"""The shapes mla_prefill is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from kernels_pallas.checking.case import Case, Inputs, Operation, Plan, Work
from kernels_pallas.mla_prefill import bench, reference
from kernels_pallas.mla_prefill.api import attend, mla_prefill
from kernels_pallas.mla_prefill.mosaic_gpu import KEYS, NOPE, QUERIES, ROPE, VALUE
from kernels_pallas.visible import Window, chain

RANK = 512
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class Shape:
    """A chunk of ``queries`` tokens per slot, of which ``counts`` count, after ``history`` rows.

    ``block``: expand the rows from latents, ``block`` at a time; None: one block of given keys and values.
    """

    heads: int
    queries: int
    counts: tuple[int, ...]
    history: tuple[int, ...]
    begin: int = 0
    block: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the longest slot."""
        return max(h + c for h, c in zip(self.history, self.counts, strict=True))


def shapes() -> dict[str, Shape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    small = {
        "small-causal": Shape(1, 200, (200,), (0,)),
        "small-ragged": Shape(2, 130, (129, 1, 0), (0, 127, 5)),
        "small-history": Shape(1, 64, (64, 33), (256, 191), begin=2),
        "small-blocks": Shape(2, 70, (70, 60), (129, 300), block=128),
    }
    real = {
        "heads128-chunk4k": Shape(128, 4096, (4096,), (0,)),
        "heads128-chunk1k-history8k": Shape(128, 1024, (1024,), (8192,)),
        "heads16-chunk8k": Shape(16, 8192, (8192,), (0,)),
        "heads16-chunk1k-ragged": Shape(16, 1024, (1024, 700, 65, 1), (0, 4096, 100, 6143)),
        "heads16-chunk1k-history32k-blocks": Shape(16, 1024, (1024,), (32768,), block=8192),
    }
    return small | real


def case(name: str, shape: Shape) -> Case:
    """The case of one shape; a single block has sums of exponentials, too."""
    if shape.block is None:
        kernel = partial(attend, scale=SCALE, implementation="mosaic_gpu")
        oracle, ways = partial(reference.attend, scale=SCALE), (bench.xla, bench.cudnn)
    else:
        kernel = partial(mla_prefill, scale=SCALE, implementation="mosaic_gpu", block=shape.block)
        oracle, ways = partial(mla_prefill, scale=SCALE, implementation="xla", block=shape.rows), ()
    return Case(
        name=f"mla_prefill/{name}",
        inputs=partial(expanded if shape.block is None else latent, shape),
        kernel=partial(counted, kernel),
        reference=partial(counted, oracle),
        work=work(shape),
        plan=plan(shape),
        baselines={way.__name__: partial(way, scale=SCALE) for way in ways},
    )


def counted(function: Operation, *inputs: Any, **options: Any) -> PyTree:
    """The function's results, with zero for queries past the count, whose results are undefined."""
    result = function(*inputs, **options)
    visible: Window = inputs[-1]
    out, *lse = result if isinstance(result, tuple) else (result,)
    counts = jnp.arange(out.shape[1]) < visible.count[:, None]
    return jnp.where(counts[..., None, None], out, 0), *(jnp.where(counts[:, None], x, 0) for x in lse)


def rows_seen(shape: Shape) -> Window:
    """The rows that each query sees: its history, and the chunk up to itself."""
    return chain(jnp.array(shape.history, jnp.int32), jnp.array(shape.counts, jnp.int32), shape.begin)


def expanded(shape: Shape, key: jax.Array) -> Inputs:
    """Queries, keys of each head and the shared one, values, rows seen."""
    slots, length = len(shape.counts), shape.rows
    of_rows = slots, length, shape.heads
    sizes = (slots, shape.queries, shape.heads, NOPE + ROPE), (*of_rows, NOPE), (slots, length, ROPE)
    arrays = [
        normal(k, s) for k, s in zip(jax.random.split(key, 4), (*sizes, (*of_rows, VALUE)), strict=True)
    ]
    return *arrays, rows_seen(shape)


def latent(shape: Shape, key: jax.Array) -> Inputs:
    """Queries, cached rows with NaN where no query sees them, expansions to keys and values, rows seen."""
    slots, length, visible = len(shape.counts), shape.rows, rows_seen(shape)
    keys = jax.random.split(key, 4)
    q = normal(keys[0], (slots, shape.queries, shape.heads, NOPE + ROPE))
    rows = normal(keys[1], (slots, length, RANK + ROPE))
    rows = jnp.where(jnp.arange(length)[:, None] < visible.end()[:, None, None], rows, jnp.nan)
    k_up = normal(keys[2], (shape.heads, NOPE, RANK)) * RANK**-0.5
    v_up = normal(keys[3], (shape.heads, VALUE, RANK)) * RANK**-0.5
    return q, rows, k_up, v_up, visible


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random bfloat16 numbers."""
    return jax.random.normal(key, shape, jnp.bfloat16)


def plan(shape: Shape) -> Plan:
    """A thread block multiplies its queries of a head with the keys up to its last query, on average."""
    blocks = [
        -(-(h + min(q + QUERIES, c) - shape.begin) // KEYS) * KEYS
        for c, h in zip(shape.counts, shape.history, strict=True)
        for q in range(0, c, QUERIES)
    ]
    keys, width = sum(blocks) / len(blocks), NOPE + ROPE + VALUE
    return Plan(len(blocks) * shape.heads, 2 * width * (keys + QUERIES), 2 * QUERIES * keys * width)


def work(shape: Shape) -> Work:
    """The least work: two products over visible pairs, and the expansion; each operand moved once."""
    pairs = sum(
        c * h + c * (c + 1) // 2 - c * shape.begin for c, h in zip(shape.counts, shape.history, strict=True)
    )
    rows = sum(c + h for c, h in zip(shape.counts, shape.history, strict=True))
    flops = 2 * shape.heads * pairs * (NOPE + ROPE + VALUE)
    moved = sum(shape.counts) * shape.heads * (NOPE + ROPE + VALUE)
    if shape.block is None:
        return Work(flops, 2 * (moved + rows * (shape.heads * (NOPE + VALUE) + ROPE)), "bf16")
    flops += 2 * rows * shape.heads * RANK * (NOPE + VALUE)
    return Work(flops, 2 * (moved + rows * (RANK + ROPE) + shape.heads * RANK * (NOPE + VALUE)), "bf16")
