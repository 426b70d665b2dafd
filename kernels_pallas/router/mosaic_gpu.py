"""The choice of experts for Hopper: one warpgroup chooses for 64 tokens, with all scores in its registers."""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import (
    WGMMA,
    WGMMA_COLUMN,
    WGMMA_ROW,
    Interpreter,
    Ref,
    Warpgroup,
    load,
    per_column,
    per_row,
)
from kernels_pallas.router.reference import ROWS
from kernels_pallas.router.rule import Rule


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    counted: Int[Array, " T"],
    *,
    rule: Rule,
    interpret: Interpreter | None = None,
) -> tuple[Int[Array, "k T"], Float[Array, "k T"], Int[Array, "b E"]]:
    """``reference.choose``, transposed, and ``reference.count`` of its ids.

    Args:
        logits: float32; T is a multiple of 64, the experts of a group of 8.
        bias: float32.
        counted: int32; 0 for tokens that choose no expert: each of their ids is E.
        rule: sizes of the choice.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    padded, experts = logits.shape
    size = experts // rule.groups
    wg = Warpgroup(interpret is not None)

    def body(
        logits: Ref, bias: Ref, counted: Ref, ids: Ref, weights: Ref, counts: Ref, chosen: Ref
    ) -> None:  # fmt: skip
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        column = wg.iota((ROWS, size), 1)

        def scores(g: jax.Array | int) -> jax.Array:
            """Scores of a group of experts; read again rather than kept: with the choice they would spill."""
            return 1 / (1 + jnp.exp(-load(logits, (rows, pl.ds(g * size, size)), WGMMA)))

        def at(index: jax.Array, g: jax.Array | int) -> jax.Array:
            """Whether each expert of group g is expert ``index`` of its row, [rows, size]."""
            return column == per_row(index - g * size, size)

        def choose_one(j: jax.Array, choice: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top = per_row(jnp.max(reduce(jnp.maximum, choice), axis=1), size)
            # Compare with the group first, a constant: ids of all experts would fill half the registers.
            group = jnp.full_like(column, rule.groups)
            for g, c in reversed(tuple(enumerate(choice))):
                group = jnp.where(c == top, g, group)
            index = jnp.minimum(jnp.min(group * size + column, axis=1), experts - 1)
            ids[j, rows] = jnp.where(load(counted, (rows,), WGMMA_ROW) > 0, index, experts)
            chosen[j] = index
            return tuple(jnp.where(at(index, g), -jnp.inf, c) for g, c in enumerate(choice))

        def weigh(g: jax.Array, weight: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            score, times, out = scores(g), jnp.zeros_like(column), []
            counts_here = per_row(load(counted, (rows,), WGMMA_ROW), size) > 0
            for j, sofar in enumerate(weight):
                hit = at(wg.row(chosen.at[j]), g)
                out.append(sofar + jnp.sum(jnp.where(hit, score, 0.0), axis=1))
                times += jnp.where(jnp.logical_and(hit, counts_here), 1, 0)
            counts[block, pl.ds(g * size, size)] = jnp.sum(times, axis=0)
            return tuple(out)

        choice = [
            scores(g) + per_column(load(bias, (pl.ds(g * size, size),), WGMMA_COLUMN), ROWS)
            for g in range(rule.groups)
        ]
        if rule.kept < rule.groups:
            choice = _keep_groups(choice, column, rule.kept)
        lax.fori_loop(0, rule.chosen, choose_one, tuple(choice))
        weight = lax.fori_loop(0, rule.groups, weigh, (wg.full((ROWS,), 0.0),) * rule.chosen)
        scale = rule.scaling / (sum(weight) + 1e-20) if rule.normalise else rule.scaling
        for j, w in enumerate(weight):
            weights[j, rows] = w * scale

    blocks = padded // ROWS
    return tuple(
        plgpu.kernel(
            body,
            kernel_name="router",
            out_type=(
                jax.ShapeDtypeStruct((rule.chosen, padded), jnp.int32),
                jax.ShapeDtypeStruct((rule.chosen, padded), jnp.float32),
                jax.ShapeDtypeStruct((blocks, experts), jnp.int32),
            ),
            scratch_types=[plgpu.SMEM((rule.chosen, ROWS), jnp.int32)],
            grid=(blocks,),
            grid_names=("block",),
            interpret=interpret,
        )(logits, bias, counted)
    )


def _keep_groups(choice: list[jax.Array], column: jax.Array, kept: int) -> list[jax.Array]:
    """The scores, with -inf outside of the groups whose best two sum to most; the first among equals."""
    size = column.shape[1]
    scores = []
    for c in choice:
        best = jnp.max(c, axis=1)
        first = jnp.min(jnp.where(c == per_row(best, size), column, size - 1), axis=1)
        second = jnp.max(jnp.where(column == per_row(first, size), -jnp.inf, c), axis=1)
        scores.append(best + second)
    out = []
    for g, c in enumerate(choice):
        ahead = [
            jnp.where(other >= scores[g] if h < g else other > scores[g], 1, 0)
            for h, other in enumerate(scores)
            if h != g
        ]
        penalty = jnp.where(sum(ahead) < kept, 0.0, jnp.inf)
        out.append(c - per_row(penalty, size))
    return out
