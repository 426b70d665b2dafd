"""The shapes grouped_matmul is checked, compiled and timed at."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.baselines import grouped_matmul as baselines
from kernels_pallas.check.case import Case, CaseInputs, KernelPlan, Work
from kernels_pallas.grouped_matmul import api, mosaic_gpu, reference
from kernels_pallas.grouped_matmul.ending import ProductEnding
from kernels_pallas.grouped_matmul.layout import ALIGNMENT, Tiles
from kernels_pallas.grouped_matmul.reference import FP4_GROUP
from kernels_pallas.grouped_matmul.tile import ProductSizes, Tile
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.quantised import BLOCK, FP8_MAX, TINY, quantise


@dataclass(frozen=True)
class ExpertsShape:
    """One product of experts with ``rows`` rows each.

    Attributes:
        rows: rows of each group, in order.
        columns, terms: N and K.
        gated: two products, gate and up, and their SwiGLU.
        fp8: e4m3 with block scales, or bfloat16.
        fp4: bfloat16 rows, and FP4 weights.
        tile: how the work is cut.
        spare: number of empty tiles at the end.
        gap: number of unused slots before each group.
        limit: largest gate, see ``ProductEnding``.
        shared: whether all groups multiply the same rows, the first of x, as ``group_all`` lays them out.
    """

    rows: tuple[int, ...]
    columns: int
    terms: int
    gated: bool
    tile: Tile
    fp8: bool = True
    spare: int = 0
    gap: int = 0
    shared: bool = False
    limit: float | None = None
    fp4: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, without the scales of FP8, which are few."""
        return 0.5 + 1 / FP4_GROUP if self.fp4 else 1.0 if self.fp8 else 2.0

    @property
    def tiles(self) -> tuple[tuple[int, int, int], ...]:
        """Group, first row and number of rows of each tile that is not empty."""
        found, first = [], 0
        for group, size in enumerate(self.rows):
            first += self.gap
            end = first - (-size // ALIGNMENT) * ALIGNMENT
            for row in range(first, end, self.tile.rows):
                found.append((group, row, min(end - row, self.tile.rows)))
            first = end
        return tuple(found)

    @property
    def slots(self) -> int:
        """Rows of the result, the last tile whole."""
        return self.tiles[-1][1] + self.tile.rows


def shapes() -> dict[str, ExpertsShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    few, many = Tile(64, 128, 2, thread_blocks=2), Tile(128, 128, 3, thread_blocks=2)
    wide, narrow = Tile(64, 256, 2, thread_blocks=3), Tile(128, 64, 2, thread_blocks=2)
    shapes = {
        "small-gated": ExpertsShape((3, 0, 70), 256, 256, True, few, spare=1, gap=8),
        "small-gated-many": ExpertsShape((130,), 256, 256, True, many, spare=1),
        "small-down-pairs": ExpertsShape((300, 9), 192, 256, False, Tile(256, 64, 2, thread_blocks=4)),
        "small-down": ExpertsShape((5, 64, 1), 256, 384, False, wide, spare=2),
        "small-down-many": ExpertsShape((1, 130), 128, 256, False, many),
        "small-edge-columns": ExpertsShape((9,), 192, 256, False, narrow),
        "small-bf16-gated": ExpertsShape((3, 65), 128, 128, True, few, fp8=False, spare=1),
        "small-gated-parts": ExpertsShape((3, 0, 19), 256, 512, True, replace(few, splits=4), spare=1, gap=8),
        "small-bf16-gated-parts": ExpertsShape(
            (3,), 128, 128, True, replace(few, splits=2), fp8=False, spare=1
        ),
        "small-gated-shared": ExpertsShape(
            (8, 0, 8), 256, 512, True, replace(few, splits=2), spare=1, shared=True
        ),
        "small-gated-limit": ExpertsShape((3, 0, 70), 256, 256, True, few, spare=1, gap=8, limit=0.5),
        "small-gated-parts-limit": ExpertsShape(
            (3,), 128, 256, True, replace(few, splits=2), spare=1, limit=0.5
        ),
        "small-down-shared": ExpertsShape((8, 8), 128, 256, False, few, shared=True),
        "small-bf16-down": ExpertsShape((100, 28), 128, 256, False, many, fp8=False),
    }
    of_fp4 = partial(ExpertsShape, columns=128, terms=512, fp8=False, fp4=True)
    shapes |= {
        "small-fp4-gated": of_fp4((3, 0, 70), gated=True, tile=few, spare=1, gap=8, limit=0.5),
        "small-fp4-gated-parts": of_fp4((3,), gated=True, tile=replace(few, splits=2), spare=1),
        "small-fp4-down": of_fp4((5, 0, 66), columns=256, gated=False, tile=wide, spare=1),
        "small-fp4-down-shared": of_fp4((8, 8), gated=False, tile=few, shared=True),
    }
    for rows in (8, 64, 256, 2048):  # of each of the experts that one of eight GPUs has, in DeepSeek-V3
        groups, gated = (rows,) * 32, api.choose_gated_tile(rows, 32, 2048, 7168)
        shapes[f"gated-32x{rows}"] = ExpertsShape(groups, 2048, 7168, True, gated)
        shapes[f"down-32x{rows}"] = ExpertsShape(groups, 7168, 2048, False, api.choose_tile(rows, 7168))
    # A token's experts, whole, or split inside each expert over eight GPUs.
    one = (1,) * 8 + (0,) * 24
    for name, columns in (("8x1", 2048), ("8x1-of8", 256)):
        gated = api.choose_gated_tile(1, 8, columns, 7168)
        shapes[f"gated-{name}"] = ExpertsShape(one, columns, 7168, True, gated, spare=24)
        shapes[f"down-{name}"] = ExpertsShape(one, 7168, columns, False, api.choose_tile(1, 7168), spare=24)
    # DeepSeek-V4-Flash's groups of heads, projected for four tokens.
    shapes["heads-8x4"] = ExpertsShape((8,) * 8, 1024, 4096, False, Tile(64, 64), gap=56)
    for name in ("gated-32x64", "gated-32x256"):  # DeepSeek-V4's limit
        shapes[f"{name}-limit"] = replace(shapes[name], limit=10.0)
    for name in ("gated-32x64", "down-32x64", "gated-32x256"):
        shapes[f"bf16-{name}"] = replace(shapes[name], fp8=False)
    # DeepSeek-V4-Flash: 6 of 256 experts for a token, or 8 or 64 rows for each of a quarter.
    for name, held in (("6x1", (1,) * 6), ("64x8", (8,) * 64), ("64x64", (64,) * 64)):
        groups, gated = held + (0,) * (256 - len(held)), api.choose_fp4_gated_tile(len(held), 2048, 4096)
        of_rows = partial(of_fp4, groups)
        shapes[f"fp4-gated-{name}"] = of_rows(columns=2048, terms=4096, gated=True, tile=gated, limit=10.0)
        plain = api.choose_fp4_tile(4096)
        shapes[f"fp4-down-{name}"] = of_rows(columns=4096, terms=2048, gated=False, tile=plain)
    return shapes


def case(name: str, shape: ExpertsShape) -> Case:
    """The case of one shape."""
    return Case(
        name=f"grouped_matmul/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, shape),
        reference=partial(reference.grouped_matmul, rows=shape.tile.rows, ending=_ending(shape)),
        work=work(shape),
        plan=plan(_sizes(shape), sum(height for *_, height in shape.tiles), shape.weight_bytes),
        baselines={"xla": partial(baselines.xla, rows=shape.tile.rows)},
    )


def inputs(shape: ExpertsShape, key: jax.Array) -> CaseInputs:
    """Random operands."""
    keys = jax.random.split(key, 3)
    held = shape.tiles
    rows = shape.tile.rows if shape.shared else shape.slots
    blocks = 2 if shape.gated else 1
    x = jax.random.normal(keys[0], (rows, shape.terms), jnp.bfloat16)
    matrices = len(shape.rows), blocks, shape.columns
    table = jnp.array((*held, *((0, 0, 0),) * shape.spare), jnp.int32).T
    tiles = Tiles(table, jnp.array([len(held)], jnp.int32))
    if shape.fp4:
        codes = jax.random.bits(keys[1], (*matrices, shape.terms // 2), jnp.uint8)
        most = 127 - round(math.log2(shape.terms) / 2)
        exponents = jax.random.randint(keys[2], (*matrices, shape.terms // FP4_GROUP), most - 4, most)
        return x, codes, None, exponents.astype(jnp.uint8), tiles
    w = jax.random.normal(keys[1], (*matrices, shape.terms), jnp.bfloat16)
    if not shape.fp8:
        return x, w / jnp.bfloat16(shape.terms**0.5), None, None, tiles
    quantised = quantise(x)
    x_scale = quantised.scale
    if not shape.shared:
        x_scale = x_scale[:, (table[1][:, None] + jnp.arange(shape.tile.rows)).reshape(-1)]
    blocked = (*w.shape[:2], -(-shape.columns // BLOCK), shape.terms // BLOCK)
    w_scale = jax.random.uniform(keys[2], blocked, minval=0.5, maxval=1.5) * shape.terms**-0.5
    return quantised.values, w.astype(jnp.float8_e4m3fn), x_scale, w_scale, tiles


def run(shape: ExpertsShape, *inputs: Any, interpret: Interpreter | None = None) -> tuple[Array, ...]:
    """The kernel's result, with the reference's values in elements that it does not write."""
    out = mosaic_gpu.grouped_matmul(*inputs, tile=shape.tile, ending=_ending(shape), interpret=interpret)
    height, row = inputs[-1].table[2], jnp.arange(shape.tile.rows)
    held = (row < height[:, None]).reshape(-1)
    index = (inputs[-1].table[1][:, None] + row).reshape(-1)
    written = jnp.zeros(shape.slots, bool).at[jnp.where(held, index, shape.slots)].set(True, mode="drop")
    values = jnp.where(written[:, None], out[0], 0).astype(out[0].dtype)
    nothing = TINY / FP8_MAX
    return (values,) if len(out) == 1 else (values, jnp.where(held, out[1], nothing))


def _sizes(shape: ExpertsShape) -> ProductSizes:
    dtype = jnp.float8_e4m3fn if shape.fp8 else jnp.bfloat16
    product = shape.gated, shape.slots, shape.columns, shape.terms, len(shape.tiles)
    return ProductSizes(shape.tile, dtype, *product, fp4=shape.fp4)


def plan(sizes: ProductSizes, rows: int, weight_bytes: float = 1) -> KernelPlan:
    """A thread block loads its share of the operands, and writes its share of ``rows`` rows.

    That FP4 is expanded is not counted.
    """
    tile, size = sizes.tile, jnp.dtype(sizes.dtype).itemsize
    terms, columns = sizes.terms // tile.splits, tile.columns * sizes.blocks
    few = sizes.fp4 and rows <= ALIGNMENT * sizes.tiles
    written = jnp.dtype(sizes.staged_dtype).itemsize * (columns if tile.splits > 1 else tile.columns)
    return KernelPlan(
        blocks=sizes.tiles * sizes.column_tiles * tile.splits * tile.pair,
        asked=terms * (size * (ALIGNMENT if few else sizes.block_rows) + weight_bytes * columns / tile.pair)
        + written * rows / (sizes.tiles * tile.pair),
        flops=2 * terms * sizes.block_rows * columns,
    )


def _ending(shape: ExpertsShape) -> ProductEnding:
    return ProductEnding(shape.slots if shape.shared else None, shape.limit)


def work(shape: ExpertsShape) -> Work:
    """The least work: weights of groups with rows, the rows and the results, all moved once."""
    rows, used = sum(shape.rows), sum(n > 0 for n in shape.rows)
    products = 2 if shape.gated else 1
    size = 1 if shape.fp8 else 2
    out = size if shape.gated else 2
    weights = shape.weight_bytes * used * products * shape.columns
    return Work(
        flops=2 * rows * products * shape.columns * shape.terms,
        bytes=(weights + size * rows) * shape.terms + out * rows * shape.columns,
        format="fp8" if shape.fp8 else "bf16",
    )
