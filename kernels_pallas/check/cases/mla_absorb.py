"""The shapes mla_absorb is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.mla_absorb.api import mla_absorb
from kernels_pallas.mla_absorb.mosaic_gpu import RANK, ROPE


@dataclass(frozen=True)
class AbsorbShape:
    """A window of tokens of each slot.

    Attributes:
        window, slots, heads: shape of the queries.
        parts: number of float32 parts to be summed; 0: the product's result is bfloat16.
        nope: width of a head's part that is not rotated.
        interleaved: whether pairs of the rotated dimensions are neighbours.
        rows: number of rows of the product's result, of which the tokens' come first.
    """

    window: int
    slots: int
    heads: int
    parts: int = 0
    nope: int = 128
    interleaved: bool = True
    rows: int = 64

    @property
    def tokens(self) -> int:
        """Tokens of all slots."""
        return self.window * self.slots


def shapes() -> dict[str, AbsorbShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-parts": AbsorbShape(2, 2, 3, parts=2),
        "small-halves": AbsorbShape(1, 3, 2, nope=192, interleaved=False, rows=3),
        "small-most": AbsorbShape(8, 1, 1, nope=64),
        # DeepSeek-V3's dimensions on one GPU and on one of 8, and GLM-4.7-Flash's.
        "heads128-window1-batch1": AbsorbShape(1, 1, 128),
        "heads128-window4-batch1": AbsorbShape(4, 1, 128),
        "heads128-window1-batch8": AbsorbShape(1, 8, 128),
        "heads16-window4-batch1": AbsorbShape(4, 1, 16, parts=5),
        "heads20-window4-batch1": AbsorbShape(4, 1, 20, parts=5, nope=192),
    }


def case(name: str, shape: AbsorbShape) -> Case:
    """The case of one shape."""
    run = partial(mla_absorb, interleaved=shape.interleaved)
    oracle = partial(run, implementation="xla")
    return Case(
        name=f"mla_absorb/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, implementation="mosaic_gpu"),
        reference=oracle,
        work=work(shape),
        plan=plan(shape),
        baselines={"xla": oracle},
    )


def inputs(shape: AbsorbShape, key: jax.Array) -> CaseInputs:
    """Random queries, up-projection and angles."""
    keys, dtype = jax.random.split(key, 3), jnp.float32 if shape.parts else jnp.bfloat16
    width = shape.heads * (shape.nope + ROPE)
    q = jax.random.normal(keys[0], (max(shape.parts, 1), shape.rows, width), dtype)
    k_up = jax.random.normal(keys[1], (shape.heads, shape.nope, RANK), jnp.bfloat16) * shape.nope**-0.5
    angle = jax.random.uniform(keys[2], (shape.slots, shape.window, ROPE // 2), maxval=6.3)
    return q, k_up, (jnp.cos(angle), jnp.sin(angle))


def work(shape: AbsorbShape) -> Work:
    """The least work: the up-projection and the product's results read once, both results written."""
    each = (4 * shape.parts or 2) * (shape.nope + ROPE) + 2 * (RANK + ROPE)
    flops = 2 * shape.tokens * shape.heads * shape.nope * RANK
    return Work(flops, shape.heads * (2 * shape.nope * RANK + shape.tokens * each), "bf16")


def plan(shape: AbsorbShape) -> KernelPlan:
    """A thread block has a head. A warp's instructions: for a row of its up-projection a load and four
    conversions, and for each token of it a load and four multiplications."""
    of_head = work(shape).bytes / shape.heads
    return KernelPlan(shape.heads, of_head, path=shape.nope * (5 + 5 * shape.tokens))
