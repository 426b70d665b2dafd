"""A warpgroup per head: its query's rotation, and the product of its query with its up-projection.

The up-projection is read once, straight into registers: each lane of four warps has 4 of a row's 512 numbers.
A token's query lies in shared memory as float32, from which every lane takes a number at a time. There is no
copy engine, no tensor core, and no barrier but the warpgroup's own around shared memory.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.mosaic import (
    LINE,
    LINE_OF,
    Index,
    Interpreter,
    Layout,
    Ref,
    Warpgroup,
    lines,
    load,
    store,
)
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm.mosaic_gpu import ROW

RANK, ROPE = 512, 64
PAIRS = ROPE // 2
assert PAIRS == LINE, "a line of a query is half its rotated part"
# A token costs a thread four registers and, for each row of the up-projection, four multiplications. The
# narrowest product of a tensor core has eight columns: with more tokens tensor cores do less.
MOST = 8
# Rows whose loads a warp waits for together: 8 bytes of a lane each.
TOGETHER = 16
# Widths of a head's first part are multiples of this: a line has TOGETHER numbers or more.
WIDTHS = 4 * TOGETHER


def mla_absorb(
    q: Float[Array, "s M D"],
    k_up: Float[Array, "N h 512"],
    angles: tuple[Float[Array, "T 32"], Float[Array, "T 32"]],
    *,
    interleaved: bool,
    interpret: Interpreter | None = None,
) -> tuple[Float[Array, "T N 512"], Float[Array, "T N 64"]]:
    """Queries in the latent space, and their rotated part.

    Args:
        q: bfloat16, or float32 parts to be summed; D = N * (h + 64), a head's columns side by side. Rows past
            T are not read.
        k_up: bfloat16, h a multiple of 64.
        angles: cosines and sines, float32; T at most MOST.
        interleaved: whether pairs are neighbours; else they come from the two halves of the dimensions.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        Both in bfloat16. The rotated part's first numbers of pairs come first.
    """
    parts, tokens = q.shape[0], angles[0].shape[0]
    heads, nope, _ = k_up.shape
    width, row = nope + ROPE, (RANK // BLOCK, BLOCK)
    # The longest lines of a query whose number four warps can share equally.
    line = math.gcd(nope // 4, LINE)
    wg = Warpgroup(interpret is not None)

    def body(
        q_ref: Ref, pairs_ref: Ref, k_up_ref: Ref, angles_refs: tuple[Ref, Ref],
        inward_ref: Ref, rope_ref: Ref, q_s: Ref,
    ) -> None:  # fmt: skip
        head = lax.axis_index("head")

        def summed(ref: Ref, token: int, index: Index, layout: Layout = LINE_OF) -> jax.Array:
            """Parts summed and rounded to bfloat16, as between two launches."""
            each = [load(ref, (part, token, *index), layout).astype(jnp.float32) for part in range(parts)]
            return sum(each[1:], each[0]).astype(jnp.bfloat16).astype(jnp.float32)

        first = (pl.ds(head * (width // line), nope // line),)
        if interleaved:
            places = [(pl.ds((head * width + nope) // 2, PAIRS), i) for i in range(2)]
        else:
            places = [((head * width + nope) // PAIRS + i,) for i in range(2)]
        # A write to shared memory waits for all warps: everything is read first, and waited for once.
        firsts = [summed(q_ref, token, first, lines(line)) for token in range(tokens)]
        pairs = [[summed(pairs_ref, token, place) for place in places] for token in range(tokens)]
        turns = [[load(ref, (token,), LINE_OF) for ref in angles_refs] for token in range(tokens)]
        for token, (numbers, (a, b), (cos, sin)) in enumerate(zip(firsts, pairs, turns, strict=True)):
            q_s[token, :, :] = numbers
            store(rope_ref.at[token, head, 0], (a * cos - b * sin).astype(jnp.bfloat16))
            store(rope_ref.at[token, head, 1], (a * sin + b * cos).astype(jnp.bfloat16))

        def group(i: jax.Array, mixed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Add the rows whose loads are under way together, each times a number of every token."""
            begin = i * TOGETHER
            of_line, at = lax.div(begin, line), lax.rem(begin, line)
            rows = [load(k_up_ref, (head, begin + k), ROW) for k in range(TOGETHER)]
            for k, up in enumerate(rows):
                wide = up.astype(jnp.float32)
                mixed = tuple(m + q_s[token, of_line, at + k] * wide for token, m in enumerate(mixed))
            return mixed

        zero = wg.laid_out(jnp.zeros(row, jnp.float32), ROW)
        for token, mixed in enumerate(lax.fori_loop(0, nope // TOGETHER, group, (zero,) * tokens)):
            store(inward_ref.at[token, head], mixed.astype(jnp.bfloat16))

    def cut(numbers: int) -> jax.Array:
        return q.reshape(*q.shape[:2], -1, numbers)

    run = plgpu.kernel(
        body,
        kernel_name="mla_absorb",
        out_type=[
            jax.ShapeDtypeStruct((tokens, heads, *row), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens, heads, 2, PAIRS), jnp.bfloat16),
        ],
        scratch_types=[plgpu.SMEM((tokens, nope // line, line), jnp.float32)],
        grid=(heads,),
        grid_names=("head",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    inward, rope = run(cut(line), cut(2 if interleaved else PAIRS), k_up.reshape(heads, nope, *row), angles)
    return inward.reshape(tokens, heads, RANK), rope.reshape(tokens, heads, ROPE)
