"""The shapes fp8_matmul is checked, compiled and timed at."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.baselines import fp8_matmul as baselines
from kernels_pallas.check.case import Case, CaseInputs, Work
from kernels_pallas.check.cases.grouped_matmul import plan
from kernels_pallas.fp8_matmul import mosaic_gpu, reference
from kernels_pallas.fp8_matmul.api import choose_tile
from kernels_pallas.grouped_matmul.api import choose_gated_tile
from kernels_pallas.grouped_matmul.tile import ProductSizes, Tile
from kernels_pallas.quantised import BLOCK, quantise


@dataclass(frozen=True)
class DenseShape:
    """``rows`` x ``terms`` times ``columns`` x ``terms``; ``gated``: gate and up, SwiGLU of them.

    each: columns of each weight, where one launch multiplies several; their sum is ``columns``. kept: number
    of rows of the results; None: all.
    """

    rows: int
    columns: int
    terms: int
    tile: Tile
    gated: bool = False
    each: tuple[int, ...] = ()
    kept: int | None = None


def shapes() -> dict[str, DenseShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    shapes = {
        "small-split": DenseShape(64, 192, 512, Tile(64, 64, 2, splits=2, thread_blocks=3)),
        "small-split-many": DenseShape(128, 128, 512, Tile(128, 128, 2, splits=4, thread_blocks=2)),
        "small-gated": DenseShape(64, 128, 256, Tile(64, BLOCK, 2, thread_blocks=1), gated=True),
        "small-two": DenseShape(
            64, 320, 512, Tile(64, 64, 2, splits=2, thread_blocks=3), each=(128, 192), kept=8
        ),
        "small-two-whole": DenseShape(128, 384, 256, Tile(128, 64, 2, thread_blocks=2), each=(192, 192)),
        "small-gated-parts": DenseShape(64, 128, 256, Tile(64, BLOCK, 2, splits=2), gated=True),
    }
    # DeepSeek-V3 on one GPU and on one of eight: kv_a, q_a, q_b, o, the shared expert's down.
    linears = {
        "kv_a": (576, 7168),
        "q_a": (1536, 7168),
        "q_b": (24576, 1536),
        "o": (7168, 16384),
        "q_b-of8": (3072, 1536),
        "o-of8": (7168, 2048),
        "shared-down-of8": (7168, 256),
    }
    for rows in (64, 512):
        for name, (columns, terms) in linears.items():
            shapes[f"{name}-{rows}"] = DenseShape(rows, columns, terms, choose_tile(rows, terms, columns))
        both = 1536, 576
        tile = choose_tile(rows, 7168, *both)
        shapes[f"q_a-kv_a-{rows}"] = DenseShape(rows, sum(both), 7168, tile, each=both)
    # A step's few tokens.
    shapes["q_a-kv_a-8"] = replace(shapes["q_a-kv_a-64"], kept=8)
    shapes["o-of8-8"] = replace(shapes["o-of8-64"], kept=8)
    shapes["o-4096"] = DenseShape(4096, 7168, 16384, choose_tile(4096, 16384, 7168))
    for rows in (64, 512):
        for name, columns in (("mlp", 18432), ("shared", 2048), ("shared-of8", 256)):
            tile = choose_gated_tile(rows, 1, columns, 7168)
            shapes[f"{name}-gated-{rows}"] = DenseShape(rows, columns, 7168, tile, gated=True)
    return shapes


def case(name: str, shape: DenseShape) -> Case:
    """The case of one shape."""
    return Case(
        name=f"fp8_matmul/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(_run, shape),
        reference=partial(_exact, shape),
        work=work(shape),
        plan=plan(_sizes(shape), shape.rows),
        baselines={"xla": baselines.xla},
    )


def _run(shape: DenseShape, *inputs: Any, **options: Any) -> tuple[Array, ...]:
    if shape.gated:
        return mosaic_gpu.fp8_gated(*inputs, tile=shape.tile, **options)
    out = mosaic_gpu.fp8_matmul(*inputs, tile=shape.tile, left=shape.kept, **options)
    return tuple(y.sum(axis=0).astype(jnp.bfloat16) if y.ndim == 3 else y for y in out)


def _exact(shape: DenseShape, *inputs: Any) -> tuple[Array, ...]:
    found = reference.fp8_matmul(*inputs)
    return found if shape.gated else tuple(y[: shape.kept] for y in found)


def _sizes(shape: DenseShape) -> ProductSizes:
    tiles = -(-shape.rows // shape.tile.rows)
    given = shape.rows, shape.columns, shape.terms, tiles
    return ProductSizes(shape.tile, jnp.float8_e4m3fn, shape.gated, *given, each=shape.each)


def inputs(shape: DenseShape, key: jax.Array) -> CaseInputs:
    """Random operands."""
    keys = jax.random.split(key, 3)
    blocks = 2 if shape.gated else 1
    x = quantise(jax.random.normal(keys[0], (shape.rows, shape.terms), jnp.bfloat16))

    def weight(i: int, columns: int) -> tuple[jax.Array, jax.Array]:
        of_values, of_scale = (jax.random.fold_in(key, i) if i else key for key in keys[1:])
        w = jax.random.normal(of_values, (blocks, columns, shape.terms), jnp.bfloat16)
        blocked = (blocks, -(-columns // BLOCK), shape.terms // BLOCK)
        scale = jax.random.uniform(of_scale, blocked, minval=0.5, maxval=1.5) * shape.terms**-0.5
        return w.astype(jnp.float8_e4m3fn), scale

    if not shape.each:
        w, w_scale = weight(0, shape.columns)
        return x.values, w, x.scale, w_scale
    ws, scales = zip(*(weight(i, n) for i, n in enumerate(shape.each)), strict=True)
    return x.values, ws, x.scale, scales


def work(shape: DenseShape) -> Work:
    """The least work: weight, rows and results moved once."""
    weights = shape.columns * (2 if shape.gated else 1)
    return Work(
        flops=2 * shape.rows * weights * shape.terms,
        bytes=(weights + shape.rows) * shape.terms + shape.rows * shape.columns * (1 if shape.gated else 2),
        format="fp8",
    )
