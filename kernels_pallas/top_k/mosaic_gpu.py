"""The best scores without a sort, for Hopper: thread blocks find a token's least chosen score by its bits.

Floats in total order are integers (``ordered``), here without a sign. The least chosen score is the largest
number that ``count`` scores reach. Its thread blocks, a cluster, read a token's scores once and hold them in
registers. Each round sorts the scores into eight buckets by the next three bits and so fixes these bits; a
round in which exactly ``count`` scores reach a bucket is the last. Then a score is chosen if it is larger, or
if it is equal and among the first equal scores. Every choice is a bit, 32 to a word, with the number of bits
before the word.

Scores lie in lines of 32: a warp handles a line, each lane a score.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import (
    LINE,
    LINE_OF,
    LINES_OF,
    Interpreter,
    Ref,
    Warpgroup,
    load,
    ordered,
    per_column,
    per_row,
    store,
)
from kernels_pallas.splits import CLUSTER, PROCESSORS
from kernels_pallas.top_k.reference import NOTHING

READERS = 2  # warpgroups of a thread block; each has its share of the scores
LINES = 32
CHUNK = LINES * LINE
"""Scores that a warpgroup handles at a time."""

WARPS = 4  # of a warpgroup
HELD = 16  # most chunks that a warpgroup holds: 128 of a thread's 255 registers

_BITS = 3  # bits of the least score that a round fixes
_BUCKETS = 1 << _BITS
ROUNDS = -(-32 // _BITS)
_WORDS = _BUCKETS // 2  # a word has the counts of two buckets, 16 bits each
_HALF = 16
_LOW = (1 << _HALF) - 1
# A half of a word holds the sum of the counts that a lane gets, each of a warp's part of a share.
_SHARE = _LOW // (CHUNK // WARPS * (CLUSTER * READERS * WARPS // LINE))
MOST = _SHARE * CLUSTER * READERS * CHUNK
"""Most scores of a token."""
# The number that follows that of -inf.
_LEAST = 0x00800000


def choose(
    scores: Float[Array, "T L"], *, count: int, interpret: Interpreter | None = None
) -> tuple[Int[Array, "T w"], Int[Array, "T w"], Int[Array, "T n"]]:
    """The best ``count`` scores of each token as bits, 32 to a word, and the bits set before each word.

    Also returned is room for their indices: NOTHING in at least ``count`` places.

    Args:
        scores: float32, L a multiple of CHUNK and at most MOST; -inf is never chosen.
        count: most scores to choose.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    tokens, size = scores.shape
    chunks, room = size // CHUNK, -(-count // (4 * LINE)) * 4
    blocks = cluster(tokens, chunks)
    share = -(-chunks // (blocks * READERS))
    # Lines that hold one count of each warp of the token.
    lines_of_counts = max(1, blocks * READERS * WARPS // LINE)
    wg = Warpgroup(interpret is not None)

    def body(
        scores: Ref, words: Ref, before: Ref, nothing: Ref, counts: Ref, line_counts: Ref, counted: Ref
    ) -> None:
        token, reader = lax.axis_index("token"), lax.axis_index("reader")
        block = lax.axis_index("block") if blocks > 1 else 0
        mine = block * READERS + reader
        first = mine * share

        def read(i: jax.Array | int) -> jax.Array:
            """The numbers of the warpgroup's chunk i; of a chunk that does not exist, the least number."""
            chunk = jnp.minimum(first + i, chunks - 1)
            signed = ordered(load(scores, (token, pl.ds(chunk * LINES, LINES)), LINES_OF))
            number = lax.bitcast_convert_type(signed, jnp.uint32) ^ jnp.uint32(1 << 31)
            return number & jnp.where(first + i < chunks, jnp.uint32((1 << 32) - 1), jnp.uint32(0))

        held = [read(i) for i in range(share)] if share <= HELD else None

        def over(step: Callable[..., Any], carry: Any) -> Any:
            """Fold ``step`` over the warpgroup's chunks: their places and numbers."""
            if held is None:
                return lax.fori_loop(0, share, lambda i, carry: step(i, read(i), carry), carry)
            for i, number in enumerate(held):
                carry = step(i, number, carry)
            return carry

        def exchange(i: jax.Array, found: tuple[jax.Array, ...]) -> list[list[jax.Array]]:
            """Exchange counts of lines with all warpgroups of the token: lines of one number per warp.

            i: number of exchanges before.
            """
            # Counts in device memory have a place of their own each time, of which a multiprocessor's
            # first-level cache cannot have an old copy.
            at = (lax.rem(i, 2),) if blocks == 1 else (token, i)
            for j, x in enumerate(found):
                store(counts.at[(*at, j, pl.ds(mine * WARPS, WARPS))], jnp.sum(x, axis=1))
            if blocks > 1:
                wg.publish()
            plgpu.barrier_arrive(counted)
            plgpu.barrier_wait(counted)
            lines = range(lines_of_counts)
            all_of_all = [
                [load(counts, (*at, j, pl.ds(k * LINE, LINE)), LINE_OF) for k in lines]
                for j in range(len(found))
            ]
            if blocks * READERS * WARPS >= LINE:
                return all_of_all
            there = wg.iota_of((LINE,), 0, LINE_OF) < blocks * READERS * WARPS
            return [[jnp.where(there, x, 0) for x in of_all] for of_all in all_of_all]

        none = wg.laid_out(jnp.zeros((WARPS, LINE), jnp.int32), LINES_OF)

        def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Fix three more bits of the least score.

            State: number of rounds; least score; number of scores that reach it; number of scores that reach
            the least score known to be too large.
            """
            i, least, reach, above = state
            shift = ((ROUNDS - 1 - i) * _BITS).astype(jnp.uint32)

            def sort(_: Any, number: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                # The last bucket also has the scores that are in none.
                bucket = jnp.minimum((number - least) >> shift, jnp.uint32(_BUCKETS - 1))
                ones = jnp.uint32(1) << (bucket * 4)
                # A lane finds at most 8 scores of a bucket, one in each line of its warp.
                folded = sum((ones[j : j + WARPS] for j in range(WARPS, LINES, WARPS)), ones[:WARPS])
                folded = lax.bitcast_convert_type(folded, jnp.int32)
                return tuple(
                    x + (lax.shift_right_logical(folded, 4 * j) & 0xF000F) for j, x in enumerate(found)
                )

            packed = exchange(i, over(sort, (none,) * _WORDS))
            halves = [sum(lines[1:], lines[0]) for lines in packed]
            sizes = [jnp.sum(x & _LOW) for x in halves]
            sizes += [jnp.sum(lax.shift_right_logical(x, _HALF)) for x in halves[:-1]]
            unit, reaches = jnp.uint32(1) << shift, reach
            bound = least
            for size in sizes:
                reaches, bound = reaches - size, bound + unit
                enough = reaches >= count
                least, reach = jnp.where(enough, bound, least), jnp.where(enough, reaches, reach)
                above = jnp.where(enough, above, jnp.maximum(above, reaches))
            return i + 1, least, reach, above

        i, least, reach, above = lax.while_loop(
            lambda state: jnp.logical_and(state[0] < ROUNDS, state[2] != count),
            narrow,
            (jnp.int32(0), jnp.uint32(0), jnp.int32(blocks * READERS * share * CHUNK), jnp.int32(0)),
        )
        # Number of scores equal to the least to choose: perhaps all.
        everything = jnp.logical_or(reach == count, least < _LEAST)
        wanted = jnp.where(everything, count, count - above)
        least = jnp.maximum(least, jnp.uint32(_LEAST))

        def compare(i: Any, number: jax.Array, found: jax.Array) -> jax.Array:
            both = jnp.where(number > least, 1, 0) + jnp.where(number == least, 1 << _HALF, 0)
            line_counts[reader, i, :] = jnp.sum(both, axis=1)
            return found + sum((both[j : j + WARPS] for j in range(WARPS, LINES, WARPS)), both[:WARPS])

        (lines,) = exchange(i, (over(compare, none),))
        larger_before, equal_before = jnp.int32(0), jnp.int32(0)
        for k, line in enumerate(lines):
            earlier = jnp.where(wg.iota_of((LINE,), 0, LINE_OF) + k * LINE < mine * WARPS, line, 0)
            larger_before += jnp.sum(earlier & _LOW)
            equal_before += jnp.sum(lax.shift_right_logical(earlier, _HALF))

        line, lane = (wg.iota_of((LINES, LINE), axis, LINES_OF) for axis in range(2))
        bit = lax.shift_left(jnp.full_like(lane, 1), lane)

        def of_lines(i: Any) -> tuple[jax.Array, jax.Array]:
            """Numbers of larger and of equal scores in a chunk's lines before each line."""
            columns = wg.laid_out(per_column(load(line_counts, (reader, i), LINE_OF), LINES), LINES_OF)
            both = jnp.sum(jnp.where(lane < line, columns, 0), axis=1)
            return both & _LOW, lax.shift_right_logical(both, _HALF)

        def write(i: Any, number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            larger, equal, part, before_part = carry
            place = pl.ds((first + i) * LINES, LINES)
            packed = jnp.sum(load(line_counts, (reader, i), LINE_OF))
            # All equal scores of a chunk are chosen, or none, except in one chunk of a token.
            bound = least + jnp.where(equal < wanted, jnp.uint32(0), jnp.uint32(1))

            @pl.when(first + i < chunks)
            def _() -> None:
                store(words.at[token, place], jnp.sum(jnp.where(number >= bound, bit, 0), axis=1))
                larger_before, equal_before = of_lines(i)
                larger_to_here = larger + larger_before
                store(before.at[token, place], larger_to_here + jnp.minimum(equal + equal_before, wanted))

            after = equal + lax.shift_right_logical(packed, _HALF)
            here = jnp.logical_and(equal < wanted, wanted < after)
            part, before_part = jnp.where(here, i, part), jnp.where(here, equal, before_part)
            return larger + (packed & _LOW), after, part, before_part

        i, equal = over(write, (larger_before, equal_before, jnp.int32(-1), jnp.int32(0)))[2:]

        @pl.when(i >= 0)
        def _() -> None:
            number = read(i)
            equals = jnp.sum(jnp.where(number == least, bit, 0), axis=1)
            rank = _spread(wg, equal + of_lines(i)[1]) + _set_bits(_spread(wg, equals) & (bit - 1))
            chosen = jnp.logical_or(number > least, jnp.logical_and(number == least, rank < wanted))
            place = pl.ds((first + i) * LINES, LINES)
            store(words.at[token, place], jnp.sum(jnp.where(chosen, bit, 0), axis=1))

        @pl.when(mine == blocks * READERS - 1)
        def _() -> None:
            store(nothing.at[token, :, :], wg.laid_out(jnp.full((room, LINE), NOTHING, jnp.int32), LINES_OF))

    shape = jax.ShapeDtypeStruct((tokens, size // LINE), jnp.int32)
    out_type = [shape, shape, jax.ShapeDtypeStruct((tokens, room, LINE), jnp.int32)]
    scratch: list[Any] = [plgpu.SMEM((READERS, share, LINES), jnp.int32)]
    clusters: dict[str, Any] = {}
    counts = _WORDS, lines_of_counts * LINE
    if blocks == 1:
        scratch = [plgpu.SMEM((2, *counts), jnp.int32), *scratch, plgpu.Barrier(num_arrivals=READERS)]
    else:
        out_type.append(jax.ShapeDtypeStruct((tokens, ROUNDS + 1, *counts), jnp.int32))
        scratch.append(plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=READERS))
        clusters = {"cluster": (blocks,), "cluster_names": ("block",)}
    words, before, nothing, *_ = plgpu.kernel(
        body,
        kernel_name="top_k",
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=(tokens,),
        grid_names=("token",),
        num_threads=READERS,
        thread_name="reader",
        interpret=interpret,
        **clusters,
    )(scores.reshape(tokens, -1, LINE))
    return words, before, nothing.reshape(tokens, -1)


def cluster(tokens: int, chunks: int) -> int:
    """Thread blocks of a token: enough to hold its scores, and more while the GPU has room for them."""
    blocks = 1
    while blocks < CLUSTER:
        share = -(-chunks // (blocks * READERS))
        if share <= HELD and (share <= HELD // 2 or tokens * blocks * 2 > PROCESSORS):
            break
        blocks *= 2
    return blocks


def _spread(wg: Warpgroup, x: jax.Array) -> jax.Array:
    """Spread the one number of each line over all elements of the line."""
    return wg.laid_out(per_row(x, LINE), LINES_OF)


def _set_bits(x: jax.Array) -> jax.Array:
    """Number of set bits of each integer; Mosaic GPU has no operation for it."""
    x = x - (lax.shift_right_logical(x, 1) & 0x55555555)
    x = (x & 0x33333333) + (lax.shift_right_logical(x, 2) & 0x33333333)
    x = (x + lax.shift_right_logical(x, 4)) & 0x0F0F0F0F
    return lax.shift_right_logical(x * 0x01010101, 24)
