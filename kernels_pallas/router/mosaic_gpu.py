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

from kernels_pallas.grouped_matmul.layout import Groups, OwnGroups, Tiles
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
    signed,
    store,
)
from kernels_pallas.router.laying import Laying
from kernels_pallas.router.reference import BLOCK, ROWS
from kernels_pallas.router.rule import Rule

# Integers in place of scores: of an expert already chosen, below all floats; of a group not kept, -inf.
_TAKEN = -(2**31)
_DROPPED = -0x7F800001
_DEFAULT = plgpu.CompilerParams()


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    counted: Int[Array, " T"],
    own: OwnGroups | None = None,
    *,
    rule: Rule,
    interpret: Interpreter | None = None,
) -> tuple[Int[Array, "k M"], Float[Array, "k M"], Int[Array, "b E"] | Groups]:
    """``reference.choose``, transposed, and ``reference.count`` of its ids, without the zeros at its end.

    Args:
        logits: float32; T is a multiple of 4, or at most 8 with ``own``; the experts of a group of 8.
        bias: float32.
        counted: int32; 0 for tokens that choose no expert: each of their ids is E.
        own: a device's experts: one thread block chooses for all tokens, and gives the ``group_all`` of its
            choices in place of counts. The results are of 4 or 8 rows; rows past T choose no expert.
        rule: sizes of the choice.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    tokens, experts = logits.shape
    each = ROWS if own is None or tokens <= ROWS else 2 * ROWS
    padded = tokens if own is None else each
    laying = own and Laying(tokens, each, rule.chosen, own.count)
    size = experts // rule.groups
    width = next(n for n in (LINE, 16, 8) if size % n == 0)
    layout, parts = lines(width), range(experts // width)
    wg = Warpgroup(interpret is not None)

    def spread(x: jax.Array) -> jax.Array:
        return wg.laid_out(per_row(x, width), layout)

    def scored(logits: Ref, rows: slice | pl.Slice, column: slice | pl.Slice) -> jax.Array:
        """The logits of a thread block's rows; of fewer tokens than rows the last fills the rest."""
        if tokens == padded:
            return load(logits, (rows, column), layout)
        line = wg.iota_of((each, width), 0, layout)
        given = [load(logits, (t, column), layout.reduce(0)) for t in range(tokens)]
        given = [wg.laid_out(per_column(x, each), layout) for x in given]
        return reduce(lambda rest, t: jnp.where(line == t, given[t], rest), range(tokens - 1), given[-1])

    def choosing(counted: Ref, rows: slice | pl.Slice) -> jax.Array:
        """Whether each row of a thread block chooses."""
        if tokens == padded:
            return load(counted, (rows,), layout.reduce(1)) > 0
        at = wg.iota_of((each,), 0, layout.reduce(1))
        chooses = reduce(jnp.add, [jnp.where(at == t, counted[t], 0) for t in range(tokens)])
        return chooses > 0

    def body(logits: Ref, bias: Ref, counted: Ref, first: Ref, *refs: Ref, **scratch: Ref) -> None:
        ids, weights, *out = refs
        block = lax.axis_index("block")
        rows = pl.ds(block * each, each)
        lane = wg.iota_of((each, width), 1, layout)
        chooses = choosing(counted, rows)
        columns = [pl.ds(i * width, width) for i in parts]
        scores = [_score(scored(logits, rows, c), rule) for c in columns]
        biases = [load(bias, (c,), layout.reduce(0)) for c in columns]
        choice = [
            ordered(s + wg.laid_out(per_column(b, each), layout)) for s, b in zip(scores, biases, strict=True)
        ]
        if rule.kept < rule.groups:
            choice = _keep_groups(choice, rule, spread)
        weight, chosen = [], []
        for j in range(rule.chosen):
            top = spread(jnp.max(reduce(jnp.maximum, choice), axis=1))
            index = _first(choice, top, lane)
            chosen.append(jnp.where(chooses, index, experts))
            store(ids.at[j, rows], chosen[-1])
            away, score = spread(index) - lane, jnp.zeros_like(scores[0])
            for i in parts:
                hit = away == i * width
                score = jnp.where(hit, scores[i], score)
                choice[i] = signed(jnp.where(hit, _TAKEN, choice[i]))
            # No score is negative, so the bits of the largest are the largest.
            bits = jnp.max(lax.bitcast_convert_type(score, jnp.int32), axis=1)
            weight.append(lax.bitcast_convert_type(bits, jnp.float32))
        scale = rule.scaling / (sum(weight) + 1e-20) if rule.normalise else rule.scaling
        for j, w in enumerate(weight):
            store(weights.at[j, rows], w * scale)
        if laying:
            spare = layout.reduce(1)
            laying.write(wg, [wg.laid_out(x - first[0], spare) for x in chosen], spare, tuple(out), scratch)
            return
        (counts,) = out
        taken = [jnp.where(jnp.logical_and(left == _TAKEN, spread(chooses)), 1, 0) for left in choice]
        # A byte for each of four parts: warps add up four counts at once.
        for i in parts[::4]:
            four = [x << 8 * n for n, x in enumerate(taken[i : i + 4])]
            total = jnp.sum(sum(four[1:], four[0]), axis=0)
            for n, c in enumerate(columns[i : i + 4]):
                store(counts.at[block, c], lax.shift_right_logical(total, 8 * n) & 0xFF)

    first = jnp.reshape(jnp.asarray(own.first if own else 0, jnp.int32), 1)
    counts = jax.ShapeDtypeStruct((-(-padded // BLOCK) * BLOCK // ROWS, experts), jnp.int32)
    ids, weights, *out = plgpu.kernel(
        body,
        kernel_name="router",
        out_type=(
            jax.ShapeDtypeStruct((rule.chosen, padded), jnp.int32),
            jax.ShapeDtypeStruct((rule.chosen, padded), jnp.float32),
            *(laying.out_type() if laying else (counts,)),
        ),
        scratch_types=laying.scratch() if laying else {},
        grid=(padded // each,),
        grid_names=("block",),
        # Barriers would order writes and reads of the same numbers: the kernel reads none of its results.
        # Where it lays out rows, too, jax's search for layouts finds none, which lanes need not.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane if laying else _DEFAULT.lowering_semantics,
        ),
        interpret=interpret,
    )(logits, bias, counted, first)
    if not laying:
        return ids, weights, out[0]
    place = out[0].reshape(-1, each)[: rule.chosen, :tokens]
    return ids, weights, Groups(None, place, Tiles(*out[1:]))


def _score(logits: jax.Array, rule: Rule) -> jax.Array:
    """Scores of experts, none of them negative."""
    if rule.scoring == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    less = jnp.exp(-jnp.abs(logits))
    # log(1 + x) of a small x, of which the sum has few bits: log(y) x / (y - 1), y being the rounded sum.
    whole = 1 + less
    there = whole - 1
    log = jnp.where(there == 0, less, jnp.log(whole) * less / jnp.where(there == 0, 1, there))
    return jnp.sqrt(jnp.maximum(logits, 0) + log)


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
        rest = [signed(jnp.where(c == top, _TAKEN, c)) for c in group]
        less = jnp.max(reduce(jnp.maximum, rest), axis=1)
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
        behind = signed(jnp.where(choice[i] == top, last - i, behind))
    return len(choice) * width - 1 - jnp.max(behind * width + (width - 1 - lane), axis=1)


def _float(x: jax.Array) -> jax.Array:
    """The float whose ordered integer is ``x``: ordering twice changes nothing."""
    same = lax.bitcast_convert_type(x, jnp.float32)
    return lax.bitcast_convert_type(ordered(same), jnp.float32)
