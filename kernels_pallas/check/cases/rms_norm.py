"""The shapes rms_norm and quantise are checked, compiled and timed at."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, Operation, Work
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm import mosaic_gpu, reference
from kernels_pallas.weighed import Weighed


@dataclass(frozen=True)
class NormShape:
    """Rows to normalise.

    Attributes:
        rows, width: T and D.
        added: number of bfloat16 arrays added to them; the sum is then returned, too.
        plain, quantised: the results that are written.
        parts: number of float32 parts to be summed; 0: the rows are bfloat16.
        padding: number of rows of the first array that are not read.
        chosen: number of experts' results that are weighed for each row.
    """

    rows: int
    width: int
    added: int = 0
    plain: bool = False
    quantised: bool = True
    parts: int = 0
    padding: int = 0
    chosen: int = 0


@dataclass(frozen=True)
class Heads:
    """Results of heads to quantise for the output projection; ``blocks_first``: in the products' order."""

    rows: int
    heads: int
    blocks_first: bool = True


def shapes() -> dict[str, NormShape | Heads]:
    """The shapes by name. "small" shapes have few thread blocks."""
    shapes = {
        "small": NormShape(3, 512),
        "small-added": NormShape(2, 1024, added=2, plain=True),
        "small-parts": NormShape(2, 512, parts=3, padding=6),
        "small-plain": NormShape(5, 1536, added=1, plain=True, quantised=False),
        "small-weighed": NormShape(3, 1024, added=1, chosen=2),
        "small-heads": Heads(3, 8),
        "small-rows": Heads(2, 4, blocks_first=False),
        "small-heads-parts": Heads(3, 64),
        "small-rows-parts": Heads(2, 36, blocks_first=False),
        "heads128-512": Heads(512, 128),
        "heads128-64": Heads(64, 128),
        "heads16-512": Heads(512, 16),
        "prefill-heads128-4096": Heads(4096, 128, blocks_first=False),
    }
    # DeepSeek-V3: before the low-rank projections, before the experts, after the queries' low rank.
    for rows in (4, 64, 512, 4096):
        shapes[f"attention-{rows}"] = NormShape(rows, 7168, added=2)
        shapes[f"experts-{rows}"] = NormShape(rows, 7168, added=1, plain=True)
        shapes[f"low-rank-{rows}"] = NormShape(rows, 1536)
        shapes[f"weighed-{rows}"] = NormShape(rows, 7168, added=1, chosen=8)
    shapes["low-rank-parts-512"] = NormShape(512, 1536, parts=2)
    shapes["experts-parts-64"] = NormShape(64, 7168, added=1, plain=True, parts=4)
    return shapes


def case(name: str, shape: NormShape | Heads) -> Case:
    """The case of one shape of ``rms_norm``, or of ``quantise``."""
    if isinstance(shape, Heads):
        return quantise_case(name, shape)
    flags = {"total": shape.added > 0, "plain": shape.plain, "quantised": shape.quantised}
    wanted: dict[str, Any] = {"eps": 1e-6, **flags}
    read = shape.rows * shape.width * ((4 * shape.parts or 2) + 2 * (shape.added + shape.chosen))

    def oracle(addends: Sequence[Any], weight: Array) -> tuple[Array, ...]:
        plain = [x[:, : shape.rows] for x in addends if not isinstance(x, tuple)]
        for rows, place, weights in (x for x in addends if isinstance(x, tuple)):
            total = Weighed(rows.reshape(len(rows), -1), place, weights, ()).total()
            plain.append(total.reshape(plain[0][:1].shape))
        return reference.rms_norm(plain, weight, **wanted)

    written = shape.rows * shape.width * (2 * (flags["total"] + shape.plain) + shape.quantised)
    return Case(
        name=f"rms_norm/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(_written, partial(mosaic_gpu.rms_norm, rows=shape.rows, **wanted), shape.rows),
        reference=oracle,
        work=Work(flops=0, bytes=read + written, format="bf16"),
        baselines={"xla": oracle},
    )


def inputs(shape: NormShape, key: jax.Array) -> CaseInputs:
    """Random rows, some of them much larger."""
    keys = jax.random.split(key, 3)
    blocked, dtype = (shape.rows, shape.width // BLOCK, BLOCK), jnp.float32 if shape.parts else jnp.bfloat16
    rows = shape.rows + shape.padding
    x = jax.random.normal(keys[0], (shape.parts or 1, rows, *blocked[1:]), dtype)
    added = jax.random.normal(keys[1], (shape.added, 1, *blocked), jnp.bfloat16)
    x = x * jnp.exp2(jnp.arange(rows) % 7 - 3).astype(x.dtype)[:, None, None]
    weight = jax.random.uniform(keys[2], blocked[1:], jnp.bfloat16, 0.5, 1.5)
    if not shape.chosen:
        return [x, *added], weight
    slots = shape.rows * shape.chosen + 8
    results = jax.random.normal(jax.random.fold_in(key, 3), (slots, *blocked[1:]), jnp.bfloat16)
    place = jax.random.permutation(jax.random.fold_in(key, 4), slots)[: shape.rows * shape.chosen]
    # One has no place; the row that it would read holds NaN.
    place = jnp.where(place == slots - 1, 0, place).at[0].set(slots).reshape(shape.chosen, shape.rows)
    weights = jax.random.uniform(jax.random.fold_in(key, 5), (shape.chosen, shape.rows))
    return [x, *added, (results.at[-1].set(jnp.nan), place.astype(jnp.int32), weights)], weight


def quantise_case(name: str, shape: Heads) -> Case:
    """The case of one shape of ``quantise``."""
    sizes = (shape.heads, shape.rows) if shape.blocks_first else (shape.rows, shape.heads)
    order: dict[str, Any] = {"blocks_first": shape.blocks_first}

    def inputs(key: jax.Array) -> CaseInputs:
        return (jax.random.normal(key, (*sizes, BLOCK), jnp.bfloat16),)

    oracle = partial(reference.quantise, **order)
    return Case(
        name=f"rms_norm/{name}",
        inputs=inputs,
        kernel=partial(_written, partial(mosaic_gpu.quantise, **order), shape.rows),
        reference=oracle,
        work=Work(flops=0, bytes=shape.rows * shape.heads * BLOCK * 3, format="bf16"),
        baselines={"xla": oracle},
    )


def _written(
    kernel: Operation, rows: int, *inputs: Any, interpret: Interpreter | None = None
) -> tuple[Array, ...]:
    """The kernel's results without padding rows: scales are [k, M], other results [M, k, 128]."""
    out = kernel(*inputs, interpret=interpret)
    return tuple(x[:, :rows] if x.ndim == 2 else x[:rows] for x in out)
