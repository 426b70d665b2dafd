"""The shapes expert_layout is checked, compiled and timed at."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.check.case import Case, CaseInputs, Work
from kernels_pallas.expert_layout import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.layout import Groups, slots
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.router.reference import BLOCK, ROWS, count


@dataclass(frozen=True)
class LayoutShape:
    """Tokens choose some of ``total`` experts; ``here`` experts, from ``first`` on, are laid out.

    Attributes:
        idle: one in ``idle`` tokens chooses no expert, id ``total``; 0: all tokens choose.
    """

    tokens: int
    chosen: int
    total: int
    first: int
    here: int
    rows: int
    idle: int = 0


def shapes() -> dict[str, LayoutShape]:
    """The shapes by name. "small" shapes have few thread blocks."""
    return {
        "small-all": LayoutShape(70, 4, 16, 0, 16, 64),
        "small-some": LayoutShape(64, 3, 96, 32, 32, 64),
        "small-many-tiles": LayoutShape(128, 1, 72, 0, 72, 64),
        "small-idle": LayoutShape(70, 3, 64, 32, 32, 64, idle=2),
        "small-more-tokens": LayoutShape(516, 1, 16, 8, 8, 64, idle=5),
        "small-384": LayoutShape(70, 8, 384, 0, 384, 64),
        "v3-64": LayoutShape(64, 8, 256, 0, 256, 64),
        "v3-512": LayoutShape(512, 8, 256, 0, 256, 64),
        "v3-512-of8": LayoutShape(512, 8, 256, 96, 32, 64),
        "v3-8192": LayoutShape(8192, 8, 256, 0, 256, 128),
        "kimi-k2-64": LayoutShape(64, 8, 384, 0, 384, 64),
    }


def case(name: str, shape: LayoutShape) -> Case:
    """The case of one shape: every number is an integer, and has to be right."""
    return Case(
        name=f"expert_layout/{name}",
        inputs=partial(inputs, shape),
        kernel=partial(run, shape),
        reference=partial(expected, shape),
        work=Work(flops=0, bytes=12 * shape.tokens * shape.chosen, format="bf16"),
        tolerance=1e-9,
        baselines={
            "xla": lambda ids, counts, first: reference.arrange(
                ids.T, counts, first, experts=shape.here, rows=shape.rows
            )
        },
    )


def inputs(shape: LayoutShape, key: jax.Array) -> CaseInputs:
    """Random choices, in which some experts are far more frequent."""
    noise = jax.random.gumbel(key, (shape.tokens, shape.total)) + 3 * jnp.sin(jnp.arange(shape.total))
    ids = jax.lax.top_k(noise, shape.chosen)[1]
    if shape.idle:
        ids = ids.at[:: shape.idle].set(shape.total)
    padded = jnp.pad(ids, ((0, -shape.tokens % BLOCK), (0, 0)))
    # Rows of counts past the tokens hold anything.
    counts = count(ids, shape.total).at[-(-shape.tokens // ROWS) :].set(99)
    return padded.T, counts, jnp.array([shape.first], jnp.int32)


def run(shape: LayoutShape, *inputs: Any, interpret: Interpreter | None = None) -> tuple[Array, ...]:
    """The kernel's layout."""
    groups = mosaic_gpu.arrange(
        *inputs, experts=shape.here, rows=shape.rows, tokens=shape.tokens, interpret=interpret
    )
    return comparable(shape, groups)


def expected(shape: LayoutShape, ids: jax.Array, counts: jax.Array, first: jax.Array) -> tuple[Array, ...]:
    """The layout in plain jnp."""
    return comparable(
        shape, reference.arrange(ids.T[: shape.tokens], counts, first, experts=shape.here, rows=shape.rows)
    )


def comparable(shape: LayoutShape, groups: Groups) -> tuple[Array, ...]:
    """The defined parts of a layout: places, tokens of used slots, and tiles that are not empty."""
    assert groups.token is not None, "rows of a layout of whole tiles were to be gathered"
    place = groups.place[:, : shape.tokens]
    total = slots(shape.tokens * shape.chosen, shape.here, shape.rows)
    used = jnp.zeros(total, bool).at[place.reshape(-1)].set(True, mode="drop")
    tiles = groups.tiles.table[:, : shape.tokens * shape.chosen // shape.rows + 1]
    held = jnp.arange(tiles.shape[1]) < groups.tiles.count[0]
    return (
        place,
        jnp.where(used, groups.token, 0),
        jnp.where(held, tiles, 0),
        groups.tiles.count[:1],
    )
