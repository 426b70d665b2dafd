"""The shapes top_k is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.top_k import reference
from kernels_pallas.top_k.api import top_k
from kernels_pallas.top_k.mosaic_gpu import CHUNK, HELD, READERS, ROUNDS, cluster

# Instructions of a round: 452 where a warpgroup has 6 chunks, 574 where it has 8 (docs/kernels.md).
ROUND, ROUND_OF_CHUNK = 86, 61


@dataclass(frozen=True)
class TopKShape:
    """``tokens`` choose ``count`` of ``entries``, of which each token sees some of the first.

    values: number of different scores; 0: any float, all different.
    """

    tokens: int
    entries: int
    count: int = 2048
    values: int = 0


def shapes() -> dict[str, TopKShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-different": TopKShape(2, 2048, 300),
        "small-ties": TopKShape(3, 4200, 700, values=5),
        "small-all-equal": TopKShape(2, 2500, 33, values=1),
        "small-every-warpgroup": TopKShape(2, 10240, 2048, values=300),
        "small-cluster": TopKShape(2, 18000, 2048, values=40),
        # A cluster of eight thread blocks with ties across them; more scores than its registers hold.
        "ties-65k": TopKShape(3, 66560, values=3000),
        "reread-257k": TopKShape(2, 263168),
        # DeepSeek-V3.2: a step of 40 slots, of one slot with a long context; a chunk of a prompt.
        "window4-batch40-12k": TopKShape(160, 12288),
        "window4-batch1-128k": TopKShape(4, 131072),
        "chunk2k-32k": TopKShape(2048, 32768),
    }


def case(name: str, shape: TopKShape) -> Case:
    """The case of one shape."""
    oracle = partial(reference.top_k, count=shape.count)
    return Case(
        name=f"top_k/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(top_k, count=shape.count, implementation="mosaic_gpu"),
        reference=oracle,
        work=work(shape),
        plan=plan(shape),
        tolerance=0.0,
        baselines={"xla": oracle},
    )


def inputs(shape: TopKShape, key: jax.Array) -> CaseInputs:
    """Random scores of either sign, -inf for entries that a token does not see.

    The last token sees all entries, the first token fewer than it may choose.
    """
    keys, size = jax.random.split(key), (shape.tokens, shape.entries)
    if shape.values:
        scores = jax.random.randint(keys[0], size, 0, shape.values).astype(jnp.float32) - shape.values // 2
        # Zeros of both signs, whose order counts, too.
        scores = jnp.where(scores == 0, jnp.where(jnp.arange(shape.entries) % 2, 0.0, -0.0), scores)
        scores = jnp.where(scores == shape.values // 2, jnp.inf, scores)
    else:
        scores = jax.random.normal(keys[0], size)
    end = jax.random.randint(keys[1], (shape.tokens, 1), 1, shape.entries)
    end = end.at[0].set(shape.count // 2).at[-1].set(shape.entries)
    return (jnp.where(jnp.arange(shape.entries) < end, scores, -jnp.inf),)


def plan(shape: TopKShape) -> KernelPlan:
    """A thread block reads its share of a token's scores, and sorts them in as many rounds as bits need."""
    chunks = -(-shape.entries // CHUNK)
    blocks = cluster(shape.tokens, chunks)
    share = -(-chunks // (blocks * READERS))
    return KernelPlan(
        blocks=shape.tokens * blocks,
        asked=4 * CHUNK * READERS * share * (1 if share <= HELD else ROUNDS + 2),
        path=ROUNDS * (ROUND + ROUND_OF_CHUNK * share),
    )


def work(shape: TopKShape) -> Work:
    """The least work: scores read once, choices written."""
    return Work(flops=0, bytes=4 * shape.tokens * (shape.entries + shape.count), format="bf16")
