"""The shapes mla_values is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.mla_decode.api import MixedLatents
from kernels_pallas.mla_decode.mosaic_gpu import rows_per_block
from kernels_pallas.mla_decode.thread_block import ROWS
from kernels_pallas.mla_values.api import mla_values
from kernels_pallas.mla_values.mosaic_gpu import RANK
from kernels_pallas.quantised import BLOCK


@dataclass(frozen=True)
class ValuesShape:
    """A window of tokens of each slot.

    Attributes:
        window, slots, heads: number of a slot's tokens, of slots, of heads.
        splits: number of parts that are merged.
        width: number of values of a head.
    """

    window: int
    slots: int
    heads: int
    splits: int
    width: int = 128

    @property
    def tokens(self) -> int:
        """Tokens of all slots."""
        return self.window * self.slots

    @property
    def height(self) -> int:
        """Query rows of a slot, heads of zeros among them."""
        return self.window * -(-self.heads // 8) * 8


def shapes() -> dict[str, ValuesShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-parts": ValuesShape(2, 3, 3, 5),
        "small-one-part": ValuesShape(1, 1, 2, 1, 256),
        "small-most": ValuesShape(8, 1, 1, 19),
        # DeepSeek-V3's dimensions on one GPU and on one of 8, and GLM-4.7-Flash's.
        "heads128-window1-batch1": ValuesShape(1, 1, 128, 32),
        "heads128-window4-batch1": ValuesShape(4, 1, 128, 16),
        "heads128-window1-batch8": ValuesShape(1, 8, 128, 8),
        "heads16-window4-batch1": ValuesShape(4, 1, 16, 32),
        "heads20-window4-batch1": ValuesShape(4, 1, 20, 32, 256),
    }


def case(name: str, shape: ValuesShape) -> Case:
    """The case of one shape."""
    run = partial(_run, shape)
    oracle = partial(run, implementation="xla")
    return Case(
        name=f"mla_values/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, implementation="mosaic_gpu"),
        reference=oracle,
        work=work(shape),
        plan=plan(shape),
        baselines={"xla": oracle},
    )


def _run(shape: ValuesShape, mixed: MixedLatents, v_up: Array, **options: Any) -> tuple[Array, ...]:
    """The results without padding rows."""
    rows = mla_values(mixed, v_up, window=shape.window, **options)
    return rows.values[: shape.tokens], rows.scale[:, : shape.tokens]


def inputs(shape: ValuesShape, key: jax.Array) -> CaseInputs:
    """Random parts of different weights, and an up-projection."""
    keys, of_slot = jax.random.split(key, 3), (shape.splits, shape.slots)
    out = jax.random.normal(keys[0], (*of_slot, shape.height, RANK), jnp.bfloat16)
    blocks = shape.height // rows_per_block(shape.height)
    lse = 3 * jax.random.normal(keys[1], (*of_slot, blocks, ROWS), jnp.float32)
    v_up = jax.random.normal(keys[2], (shape.heads, shape.width, RANK), jnp.bfloat16) * RANK**-0.5
    return MixedLatents(out, lse), v_up


def work(shape: ValuesShape) -> Work:
    """The least work: the up-projection and all parts read once, e4m3 values written."""
    each = shape.splits * (2 * RANK + 4) + shape.width
    flops = 2 * shape.tokens * shape.heads * shape.width * RANK
    return Work(flops, shape.heads * (2 * shape.width * RANK + shape.tokens * each), "bf16")


def plan(shape: ValuesShape) -> KernelPlan:
    """A thread block has 128 values of a head. A warp's instructions: for a part of every fourth token nine,
    a load among them; for each of its eight rows 18, and for each token of it 4 loads, 16 products, and five
    steps of a sum over lanes, of two instructions. The four warps of a scheduler take turns, and so issue
    twice as fast as one whose instructions wait."""
    blocks = shape.heads * shape.width // BLOCK
    asked = BLOCK * RANK * 2 + shape.tokens * (shape.splits * (2 * RANK + 4) + BLOCK)
    path = -(-shape.tokens // 4) * shape.splits * 9 + 4 // 2 * 8 * (18 + 30 * shape.tokens)
    return KernelPlan(blocks, asked, path=path)
