"""The shapes mla_prefill is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from kernels_pallas.check.baselines import mla_prefill as baselines
from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Operation, Work
from kernels_pallas.mla_prefill import reference
from kernels_pallas.mla_prefill.api import Blocks, attend, mla_prefill
from kernels_pallas.mla_prefill.sizes import QUERIES, ROPE, HeadWidths
from kernels_pallas.visible import Window, chain

RANK = 512
# Widths of DeepSeek-V3's keys and values, and of GLM-4.7-Flash's and GLM-5's.
DEEPSEEK, GLM = HeadWidths(128, 128), HeadWidths(192, 256)


@dataclass(frozen=True)
class PrefillShape:
    """A chunk of ``queries`` tokens per slot, of which ``counts`` count, after ``history`` rows.

    Attributes:
        block: expand the rows from latents, ``block`` at a time; None: one block of given keys and values.
        sizes: widths of a head.
    """

    heads: int
    queries: int
    counts: tuple[int, ...]
    history: tuple[int, ...]
    begin: int = 0
    block: int | None = None
    sizes: HeadWidths = DEEPSEEK

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.sizes.query**-0.5

    @property
    def rows(self) -> int:
        """Rows of the longest slot."""
        return max(h + c for h, c in zip(self.history, self.counts, strict=True))


def shapes() -> dict[str, PrefillShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    small = {
        "small-causal": PrefillShape(1, 200, (200,), (0,)),
        "small-ragged": PrefillShape(2, 130, (129, 1, 0), (0, 127, 5)),
        "small-history": PrefillShape(1, 64, (64, 33), (256, 191), begin=2),
        "small-blocks": PrefillShape(2, 70, (70, 60), (129, 300), block=128),
        "small-glm-causal": PrefillShape(1, 200, (200,), (0,), sizes=GLM),
        "small-glm-ragged": PrefillShape(2, 130, (129, 1, 0), (0, 127, 5), sizes=GLM),
        "small-glm-history": PrefillShape(1, 64, (64, 33), (256, 191), begin=2, sizes=GLM),
        "small-glm-blocks": PrefillShape(2, 70, (70, 60), (129, 300), block=128, sizes=GLM),
        "small-widest-key": PrefillShape(1, 70, (70,), (100,), sizes=HeadWidths(320, 64)),
        "small-widest-value": PrefillShape(1, 70, (70,), (100,), sizes=HeadWidths(128, 256)),
        "small-narrow-value": PrefillShape(1, 70, (70,), (100,), sizes=HeadWidths(256, 128)),
    }
    real = {
        "heads128-chunk4k": PrefillShape(128, 4096, (4096,), (0,)),
        "heads128-chunk1k-history8k": PrefillShape(128, 1024, (1024,), (8192,)),
        "heads16-chunk8k": PrefillShape(16, 8192, (8192,), (0,)),
        "heads16-chunk1k-ragged": PrefillShape(16, 1024, (1024, 700, 65, 1), (0, 4096, 100, 6143)),
        "heads16-chunk1k-history32k-blocks": PrefillShape(16, 1024, (1024,), (32768,), block=8192),
        "glm-heads20-chunk4k": PrefillShape(20, 4096, (4096,), (0,), sizes=GLM),
        "glm-heads20-chunk1k-ragged": PrefillShape(
            20, 1024, (1024, 700, 65, 1), (0, 4096, 100, 6143), sizes=GLM
        ),
        "glm-heads20-chunk1k-history32k-blocks": PrefillShape(
            20, 1024, (1024,), (32768,), block=8192, sizes=GLM
        ),
        "glm-heads64-chunk4k": PrefillShape(64, 4096, (4096,), (0,), sizes=GLM),
        "glm-heads64-chunk1k-history8k": PrefillShape(64, 1024, (1024,), (8192,), sizes=GLM),
    }
    return small | real


def case(name: str, shape: PrefillShape) -> Case:
    """The case of one shape; a single block has sums of exponentials, too."""
    if shape.block is None:
        kernel = partial(attend, scale=shape.scale, implementation="mosaic_gpu")
        oracle, ways = partial(reference.attend, scale=shape.scale), (baselines.xla, baselines.cudnn)
    else:
        kernel = partial(over_rows, shape.block, scale=shape.scale, implementation="mosaic_gpu")
        oracle, ways = partial(over_rows, shape.rows, scale=shape.scale, implementation="xla"), ()
    return Case(
        name=f"mla_prefill/{name}",
        inputs=partial(expanded if shape.block is None else latent, shape),
        kernel=partial(counted, kernel),
        reference=partial(counted, oracle),
        work=work(shape),
        plan=plan(shape),
        baselines={way.__name__: partial(way, scale=shape.scale) for way in ways},
    )


def over_rows(
    size: int,
    q: jax.Array,
    rows: jax.Array,
    k_up: jax.Array,
    v_up: jax.Array,
    visible: Window,
    **options: Any,
) -> jax.Array:
    """``mla_prefill`` over rows at hand, [B, L, C + R], ``size`` at a time."""
    length = rows.shape[1]
    rows = jnp.where(visible.seen(length)[..., None], rows, 0)
    rows = jnp.pad(rows, ((0, 0), (0, -length % size), (0, 0)))
    count = 1 if length <= size else -(-jnp.minimum(visible.end().max(), length) // size)

    def read(i: jax.Array | int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(rows, i * size, size, axis=1)

    return mla_prefill(q, Blocks(read, size, count), k_up, v_up, visible, **options)


def counted(function: Operation, *inputs: Any, **options: Any) -> PyTree:
    """The function's results, with zero for queries past the count, whose results are undefined."""
    result = function(*inputs, **options)
    visible: Window = inputs[-1]
    out, *lse = result if isinstance(result, tuple) else (result,)
    counts = jnp.arange(out.shape[1]) < visible.count[:, None]
    return jnp.where(counts[..., None, None], out, 0), *(jnp.where(counts[:, None], x, 0) for x in lse)


def rows_seen(shape: PrefillShape) -> Window:
    """The rows that each query sees: its history, and the chunk up to itself."""
    return chain(jnp.array(shape.history, jnp.int32), jnp.array(shape.counts, jnp.int32), shape.begin)


def expanded(shape: PrefillShape, key: jax.Array) -> CaseInputs:
    """Queries, keys of each head and the shared one, values, rows seen."""
    rows, own = (len(shape.counts), shape.rows), shape.sizes
    sizes = (
        (len(shape.counts), shape.queries, shape.heads, own.query),
        (*rows, shape.heads, own.key),
        (*rows, ROPE),
        (*rows, shape.heads, own.value),
    )
    arrays = [normal(k, s) for k, s in zip(jax.random.split(key, 4), sizes, strict=True)]
    return *arrays, rows_seen(shape)


def latent(shape: PrefillShape, key: jax.Array) -> CaseInputs:
    """Queries, cached rows with NaN where no query sees them, expansions to keys and values, rows seen."""
    slots, length, visible = len(shape.counts), shape.rows, rows_seen(shape)
    keys, own = jax.random.split(key, 4), shape.sizes
    q = normal(keys[0], (slots, shape.queries, shape.heads, own.query))
    rows = normal(keys[1], (slots, length, RANK + ROPE))
    rows = jnp.where(jnp.arange(length)[:, None] < visible.end()[:, None, None], rows, jnp.nan)
    k_up = normal(keys[2], (shape.heads, own.key, RANK)) * RANK**-0.5
    v_up = normal(keys[3], (shape.heads, own.value, RANK)) * RANK**-0.5
    return q, rows, k_up, v_up, visible


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random bfloat16 numbers."""
    return jax.random.normal(key, shape, jnp.bfloat16)


def plan(shape: PrefillShape) -> KernelPlan:
    """A thread block multiplies its queries of a head with the keys up to its last query, on average."""
    step, width = shape.sizes.keys, shape.sizes.query + shape.sizes.value
    blocks = [
        -(-(h + min(q + QUERIES, c) - shape.begin) // step) * step
        for c, h in zip(shape.counts, shape.history, strict=True)
        for q in range(0, c, QUERIES)
    ]
    keys = sum(blocks) / len(blocks)
    return KernelPlan(len(blocks) * shape.heads, 2 * width * (keys + QUERIES), 2 * QUERIES * keys * width)


def work(shape: PrefillShape) -> Work:
    """The least work: two products over visible pairs, and the expansion; each operand moved once."""
    pairs = sum(
        c * h + c * (c + 1) // 2 - c * shape.begin for c, h in zip(shape.counts, shape.history, strict=True)
    )
    rows = sum(c + h for c, h in zip(shape.counts, shape.history, strict=True))
    own, heads = shape.sizes, shape.heads
    flops = 2 * heads * pairs * (own.query + own.value)
    moved, expanded = sum(shape.counts) * heads * (own.query + own.value), own.key + own.value
    if shape.block is None:
        return Work(flops, 2 * (moved + rows * (heads * expanded + ROPE)), "bf16")
    flops += 2 * rows * heads * RANK * expanded
    return Work(flops, 2 * (moved + rows * (RANK + ROPE) + heads * RANK * expanded), "bf16")
