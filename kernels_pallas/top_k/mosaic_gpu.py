"""The best scores without a sort, for Hopper: a thread block finds a token's least chosen score by its bits.

Floats in total order are integers (``ordered``). The least chosen score is the largest number that ``count``
scores reach. Each pass over all scores, which stay in L1 or L2, fixes two of its bits. Then a score is chosen
if it is larger, or if it is equal and among the first equal scores. Every choice is a bit, 32 to a word, with
the number of bits before the word.

Scores lie in lines of 32: a warp handles a line, each lane a score.
"""

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
)
from kernels_pallas.top_k.reference import NOTHING

READERS = 4  # warpgroups; each has its share of the scores
LINES = 64
CHUNK = LINES * LINE
"""Scores that a warpgroup reads at a time."""

_BITS = 2  # bits of the least score that a pass fixes
_CANDIDATES = (1 << _BITS) - 1
# Lines whose counts warpgroups exchange, so that the counts of all warpgroups fill a warp's lanes.
_FOLDED = LINE // READERS
_LOWEST = -(2**31)
# The ordered integer that follows that of -inf.
_LEAST = -0x7F800000
_HALF = 16  # bits that hold a count within a chunk


def choose(
    scores: Float[Array, "T L"], *, count: int, interpret: Interpreter | None = None
) -> tuple[Int[Array, "T w"], Int[Array, "T w"], Int[Array, "T n"]]:
    """The best ``count`` scores of each token as bits, 32 to a word, and the bits set before each word.

    Also returned is room for their indices: NOTHING in at least ``count`` places.

    Args:
        scores: float32, L a multiple of CHUNK; -inf is never chosen.
        count: most scores to choose.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    tokens, size = scores.shape
    chunks = size // CHUNK
    share, room = -(-chunks // READERS), -(-count // (4 * LINE)) * 4
    wg = Warpgroup(interpret is not None)

    def body(
        scores: Ref, words: Ref, before: Ref, nothing: Ref, counts: Ref, chunk_counts: Ref, counted: Ref
    ) -> None:
        reader, token = lax.axis_index("reader"), lax.axis_index("token")
        first = jnp.minimum(reader * share, chunks)
        last = jnp.minimum(first + share, chunks)
        none = wg.laid_out(jnp.zeros((LINES, LINE), jnp.int32), LINES_OF)

        def numbers(chunk: jax.Array) -> jax.Array:
            return ordered(load(scores, (token, pl.ds(chunk * LINES, LINES)), LINES_OF))

        def exchange(parity: jax.Array | int, found: tuple[jax.Array, ...]) -> list[jax.Array]:
            """Exchange the counts of all warpgroups for each candidate, 8 numbers per warpgroup."""
            for i, x in enumerate(found):
                parts = [x[j : j + _FOLDED] for j in range(0, LINES, _FOLDED)]
                counts[parity, i, pl.ds(reader * _FOLDED, _FOLDED)] = jnp.sum(
                    sum(parts[1:], parts[0]), axis=1
                )
            plgpu.barrier_arrive(counted)
            plgpu.barrier_wait(counted)
            return [load(counts, (parity, i), LINE_OF) for i in range(len(found))]

        def narrow(i: jax.Array, least: jax.Array) -> jax.Array:
            """Fix two more bits of the least score."""
            unit = lax.shift_left(jnp.int32(1), 32 - _BITS - _BITS * i)
            candidates = [least + unit * (j + 1) for j in range(_CANDIDATES)]

            def reach(chunk: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                number = numbers(chunk)
                return tuple(x + jnp.where(number >= c, 1, 0) for x, c in zip(found, candidates, strict=True))

            found = lax.fori_loop(first, last, reach, (none,) * _CANDIDATES)
            # A warpgroup may still read the counts exchanged before.
            for of_all in exchange(lax.rem(i, 2), found):
                least += jnp.where(jnp.sum(of_all) >= count, unit, 0)
            return least

        least = jnp.maximum(lax.fori_loop(0, 32 // _BITS, narrow, jnp.int32(_LOWEST)), _LEAST)

        def compare(chunk: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = numbers(chunk)
            larger, equal = found
            return larger + jnp.where(number > least, 1, 0), equal + jnp.where(number == least, 1, 0)

        found = lax.fori_loop(first, last, compare, (none, none))
        larger, equal = exchange(0, found)
        at = wg.iota_of((LINE,), 0, LINE_OF)
        wanted = count - jnp.sum(larger)  # number of equal scores to choose
        here = [jnp.sum(jnp.where(at < reader * _FOLDED, x, 0)) for x in (larger, equal)]

        def write(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number, lines = numbers(chunk), pl.ds(chunk * LINES, LINES)
            line, lane = (wg.iota_of((LINES, LINE), axis, LINES_OF) for axis in range(2))
            larger, equal = number > least, number == least
            chunk_counts[reader, :] = jnp.sum(
                jnp.where(larger, 1, 0) + jnp.where(equal, 1 << _HALF, 0), axis=1
            )
            halves = [load(chunk_counts, (reader, pl.ds(j * LINE, LINE)), LINE_OF) for j in range(2)]
            earlier = [
                jnp.where(lane + j * LINE < line, wg.laid_out(per_column(half, LINES), LINES_OF), 0)
                for j, half in enumerate(halves)
            ]
            both, of_chunk = jnp.sum(earlier[0] + earlier[1], axis=1), jnp.sum(halves[0] + halves[1])
            larger_before = carry[0] + (both & (1 << _HALF) - 1)
            equal_before = carry[1] + lax.shift_right_logical(both, _HALF)
            bit = lax.shift_left(jnp.full_like(lane, 1), lane)
            equals = jnp.sum(jnp.where(equal, bit, 0), axis=1)
            rank = _spread(wg, equal_before) + _set_bits(_spread(wg, equals) & (bit - 1))
            chosen = jnp.logical_or(larger, jnp.logical_and(equal, rank < wanted))
            words[token, lines] = jnp.sum(jnp.where(chosen, bit, 0), axis=1)
            before[token, lines] = larger_before + jnp.minimum(equal_before, wanted)
            return carry[0] + (of_chunk & (1 << _HALF) - 1), carry[1] + lax.shift_right_logical(
                of_chunk, _HALF
            )

        lax.fori_loop(first, last, write, tuple(here))

        @pl.when(reader == READERS - 1)
        def _() -> None:
            nothing[token, :, :] = wg.laid_out(jnp.full((room, LINE), NOTHING, jnp.int32), LINES_OF)

    shape = jax.ShapeDtypeStruct((tokens, size // LINE), jnp.int32)
    words, before, nothing = plgpu.kernel(
        body,
        kernel_name="top_k",
        out_type=(shape, shape, jax.ShapeDtypeStruct((tokens, room, LINE), jnp.int32)),
        scratch_types=[
            plgpu.SMEM((2, _CANDIDATES, LINE), jnp.int32),
            plgpu.SMEM((READERS, LINES), jnp.int32),
            plgpu.Barrier(num_arrivals=READERS),
        ],
        grid=(tokens,),
        grid_names=("token",),
        num_threads=READERS,
        thread_name="reader",
        interpret=interpret,
    )(scores.reshape(tokens, -1, LINE))
    return words, before, nothing.reshape(tokens, -1)


def _spread(wg: Warpgroup, x: jax.Array) -> jax.Array:
    """Spread the one number of each line over all elements of the line."""
    return wg.laid_out(per_row(x, LINE), LINES_OF)


def _set_bits(x: jax.Array) -> jax.Array:
    """Number of set bits of each integer; Mosaic GPU has no operation for it."""
    x = x - (lax.shift_right_logical(x, 1) & 0x55555555)
    x = (x & 0x33333333) + (lax.shift_right_logical(x, 2) & 0x33333333)
    x = (x + lax.shift_right_logical(x, 4)) & 0x0F0F0F0F
    return lax.shift_right_logical(x * 0x01010101, 24)
