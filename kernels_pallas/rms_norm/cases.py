"""The shapes rms_norm and quantise are checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.checking.case import Case, Inputs, Work
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm import bench, mosaic_gpu, reference


@dataclass(frozen=True)
class Shape:
    """Rows to normalise.

    Attributes:
        rows, width: T and D.
        residual: whether one is added.
        plain, quantised: what is written.
    """

    rows: int
    width: int
    residual: bool = False
    plain: bool = False
    quantised: bool = True


def shapes() -> dict[str, Shape]:
    """The shapes by name. "small" ones have few thread blocks."""
    shapes = {
        "small": Shape(3, 512),
        "small-residual": Shape(2, 1024, residual=True, plain=True),
        "small-plain": Shape(5, 1536, residual=True, plain=True, quantised=False),
    }
    # DeepSeek-V3: before the low-rank projections, before the experts, after the queries' low rank.
    for rows in (4, 64, 512, 4096):
        shapes[f"attention-{rows}"] = Shape(rows, 7168)
        shapes[f"experts-{rows}"] = Shape(rows, 7168, residual=True, plain=True)
        shapes[f"low-rank-{rows}"] = Shape(rows, 1536)
    return shapes


# Rows and heads whose results are quantised for the output projection; on one GPU and on one of eight.
_QUANTISED = {
    "small-heads": (3, 8),
    "heads128-512": (512, 128),
    "heads128-64": (64, 128),
    "heads16-512": (512, 16),
}


def cases() -> tuple[Case, ...]:
    """One case per shape."""
    normed = [case(name, shape) for name, shape in shapes().items()]
    return (*normed, *(quantise_case(name, *shape) for name, shape in _QUANTISED.items()))


def case(name: str, shape: Shape) -> Case:
    """What is checked of one shape of ``rms_norm``."""
    wanted: dict[str, Any] = {"eps": 1e-6, "plain": shape.plain, "quantised": shape.quantised}
    read = shape.rows * shape.width * 2 * (2 if shape.residual else 1)
    written = shape.rows * shape.width * (2 * (shape.residual + shape.plain) + shape.quantised)
    return Case(
        name=f"rms_norm/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(_written, partial(mosaic_gpu.rms_norm, **wanted), shape.rows),
        reference=partial(reference.rms_norm, **wanted),
        work=Work(flops=0, bytes=read + written, format="bf16"),
        small=name.startswith("small"),
        baselines=bench.baselines(**wanted),
    )


def inputs(shape: Shape, key: jax.Array) -> Inputs:
    """Random rows, some much larger than others."""
    keys = jax.random.split(key, 3)
    blocked = (shape.rows, shape.width // BLOCK, BLOCK)
    x, residual = (jax.random.normal(k, blocked, jnp.bfloat16) for k in keys[:2])
    x = x * jnp.exp2(jnp.arange(shape.rows) % 7 - 3).astype(x.dtype)[:, None, None]
    weight = jax.random.uniform(keys[2], blocked[1:], jnp.bfloat16, 0.5, 1.5)
    return x, residual if shape.residual else None, weight


def quantise_case(name: str, rows: int, heads: int) -> Case:
    """What is checked of one shape of ``quantise``."""

    def inputs(key: jax.Array) -> Inputs:
        return (jax.random.normal(key, (heads, rows, BLOCK), jnp.bfloat16),)

    return Case(
        name=f"rms_norm/{name}",
        inputs=inputs,
        kernel=partial(_written, mosaic_gpu.quantise, rows),
        reference=reference.quantise,
        work=Work(flops=0, bytes=rows * heads * BLOCK * 3, format="bf16"),
        small=name.startswith("small"),
        baselines=bench.baselines_of_quantise(),
    )


def _written(kernel: Any, rows: int, *inputs: Any, interpret: Any = None) -> tuple[Array, ...]:
    """The kernel's results without the rows that only fill tiles: scales are [k, M], all else [M, k, 128]."""
    out = kernel(*inputs, interpret=interpret)
    return tuple(x[:, :rows] if x.ndim == 2 else x[:rows] for x in out)
