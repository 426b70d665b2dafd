"""The choice of experts for Hopper: a warp chooses for a token, whose scores its lanes hold.

Scores are compared as integers in the same order, because one instruction finds the largest of a warp's 32
integers. The first of equal experts is found as the largest, too: experts are numbered from the last.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import (
    LINE,
    Interpreter,
    Ref,
    Warpgroup,
    lines,
    load,
    ordered,
    per_column,
    per_row,
)
from kernels_pallas.router.reference import BLOCK, ROWS
from kernels_pallas.router.rule import Rule

# Integers in place of scores: of an expert already chosen, below all floats; of a group not kept, -inf.
_TAKEN = -(2**31)
_DROPPED = -0x7F800001


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    counted: Int[Array, " T"],
    *,
    rule: Rule,
    interpret: Interpreter | None = None,
) -> tuple[Int[Array, "k T"], Float[Array, "k T"], Int[Array, "b E"]]:
    """``reference.choose``, transposed, and ``reference.count`` of its ids, without the zeros at its end.

    Args:
        logits: float32; T is a multiple of 4, the experts of a group of 8.
        bias: float32.
        counted: int32; 0 for tokens that choose no expert: each of their ids is E.
        rule: sizes of the choice.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    padded, experts = logits.shape
    size = experts // rule.groups
    width = next(n for n in (LINE, 16, 8) if size % n == 0)
    layout, parts = lines(width), range(experts // width)
    wg = Warpgroup(interpret is not None)

    def spread(x: jax.Array) -> jax.Array:
        return wg.laid_out(per_row(x, width), layout)

    def body(logits: Ref, bias: Ref, counted: Ref, ids: Ref, weights: Ref, counts: Ref) -> None:
        block = lax.axis_index("block")
        rows = pl.ds(block * ROWS, ROWS)
        lane = wg.iota_of((ROWS, width), 1, layout)
        chooses = load(counted, (rows,), layout.reduce(1)) > 0
        columns = [pl.ds(i * width, width) for i in parts]
        scores = [1 / (1 + jnp.exp(-load(logits, (rows, c), layout))) for c in columns]
        biases = [load(bias, (c,), layout.reduce(0)) for c in columns]
        choice = [
            ordered(s + wg.laid_out(per_column(b, ROWS), layout)) for s, b in zip(scores, biases, strict=True)
        ]
        if rule.kept < rule.groups:
            choice = _keep_groups(choice, rule, spread)
        weight = []
        for j in range(rule.chosen):
            top = spread(jnp.max(reduce(jnp.maximum, choice), axis=1))
            index = _first(choice, top, lane)
            ids[j, rows] = jnp.where(chooses, index, experts)
            away, score = spread(index) - lane, jnp.zeros_like(scores[0])
            for i in parts:
                hit = away == i * width
                score = jnp.where(hit, scores[i], score)
                choice[i] = jnp.where(hit, _TAKEN, choice[i])
            # No score is negative, so the bits of the largest are the largest.
            bits = jnp.max(lax.bitcast_convert_type(score, jnp.int32), axis=1)
            weight.append(lax.bitcast_convert_type(bits, jnp.float32))
        scale = rule.scaling / (sum(weight) + 1e-20) if rule.normalise else rule.scaling
        for j, w in enumerate(weight):
            weights[j, rows] = w * scale
        taken = [jnp.where(jnp.logical_and(left == _TAKEN, spread(chooses)), 1, 0) for left in choice]
        # A byte for each of four parts: warps add up four counts at once.
        for i in parts[::4]:
            four = [x << 8 * n for n, x in enumerate(taken[i : i + 4])]
            total = jnp.sum(sum(four[1:], four[0]), axis=0)
            for n, c in enumerate(columns[i : i + 4]):
                counts[block, c] = lax.shift_right_logical(total, 8 * n) & 0xFF

    return tuple(
        plgpu.kernel(
            body,
            kernel_name="router",
            out_type=(
                jax.ShapeDtypeStruct((rule.chosen, padded), jnp.int32),
                jax.ShapeDtypeStruct((rule.chosen, padded), jnp.float32),
                jax.ShapeDtypeStruct((-(-padded // BLOCK) * BLOCK // ROWS, experts), jnp.int32),
            ),
            grid=(padded // ROWS,),
            grid_names=("block",),
            # Barriers would order writes and reads of the same numbers: the kernel reads none of its results.
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            interpret=interpret,
        )(logits, bias, counted)
    )


def _keep_groups(
    choice: list[jax.Array], rule: Rule, spread: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """The scores, _DROPPED outside of the groups whose best two sum to most; the first among equals."""
    each = len(choice) // rule.groups
    scores = []
    for g in range(rule.groups):
        group = choice[g * each : (g + 1) * each]
        best = jnp.max(reduce(jnp.maximum, group), axis=1)
        top = spread(best)
        equals = reduce(jnp.add, [jnp.where(c == top, 1, 0) for c in group])
        less = jnp.max(reduce(jnp.maximum, [jnp.where(c == top, _TAKEN, c) for c in group]), axis=1)
        second = jnp.where(jnp.sum(equals, axis=1) > 1, best, less)
        scores.append(_float(best) + _float(second))
    out = []
    for g, mine in enumerate(scores):
        ahead = [
            jnp.where(other >= mine if h < g else other > mine, 1, 0)
            for h, other in enumerate(scores)
            if h != g
        ]
        kept = spread(reduce(jnp.add, ahead)) < rule.kept
        out += [jnp.where(kept, c, _DROPPED) for c in choice[g * each : (g + 1) * each]]
    return out


def _first(choice: list[jax.Array], top: jax.Array, lane: jax.Array) -> jax.Array:
    """The least number of each row's experts whose score is ``top``."""
    width, last = lane.shape[1], len(choice) - 1
    # Compare with the part first, a constant: numbers of all experts would fill registers.
    behind = jnp.full_like(lane, -1)
    for i in range(last, -1, -1):
        behind = jnp.where(choice[i] == top, last - i, behind)
    return len(choice) * width - 1 - jnp.max(behind * width + (width - 1 - lane), axis=1)


def _float(x: jax.Array) -> jax.Array:
    """The float whose ordered integer is ``x``: ordering twice changes nothing."""
    same = lax.bitcast_convert_type(x, jnp.float32)
    return lax.bitcast_convert_type(ordered(same), jnp.float32)
