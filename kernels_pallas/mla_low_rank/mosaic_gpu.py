"""A warpgroup per token for its queries' low rank, and one for its row of the cache, independent of it.

A row of the cache is lines of 32 numbers here: latents, then first and second numbers of the key's pairs. A
warp handles a line, each lane a number. Shared memory serves sums of squares alone; there is no barrier.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import LINE, LINE_OF, LINES_OF, Index, Interpreter, Layout, Ref, load, store
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm import mosaic_gpu as norms

RANK, ROPE = 512, 64
PAIRS = ROPE // 2
assert PAIRS == LINE, "a line of a row is half a key"

# With jax 0.10 a kernel cannot write to its inputs.
CAN_REUSE = jax.__version_info__ >= (0, 11)

# Number of lines, of LINE numbers each, of the low rank in a cached row; two of the rotated key follow.
_LATENTS = RANK // PAIRS


def mla_low_rank(
    q: Float[Array, "s M K"],
    kv: Float[Array, "u N 576"],
    q_norm: Float[Array, " K"],
    kv_norm: Float[Array, " 512"],
    angles: tuple[Float[Array, "T 32"], Float[Array, "T 32"]],
    pages: Float[Array, "P S 576"] | None,
    page_table: Int[Array, "B n"],
    positions: Int[Array, " T"],
    *,
    eps: float,
    interleaved: bool,
    interpret: Interpreter | None = None,
) -> tuple[Array, Array, Array]:
    """Queries' low rank normed, in e4m3; rows [normed latent | rotated key] of the cache.

    Args:
        q: bfloat16 or float32 parts to be summed; K is a multiple of 512. Rows past T are not read.
        kv: likewise, latents first.
        q_norm: weight of q's norm, any float type.
        kv_norm: weight of the latents' norm.
        angles: cosines and sines, float32.
        pages: bfloat16, written in place. None: the rows are returned instead, for the caller to write.
        page_table: int32, pages of each slot.
        positions: int32, row of its slot that each token is written to, if it is within the slot's pages.
        eps: added to the mean square of both norms.
        interleaved: whether pairs are neighbours; else they come from the two halves of the dimensions.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        e4m3 values [M, K / 128, 128] and float32 scales [K / 128, M] as `rms_norm` gives them; and the pages,
        or rows [T, 576] in bfloat16.
    """
    tokens, width = positions.shape[0], q.shape[2]
    window = tokens // page_table.shape[0]

    def body(
        q_ref: Ref, kv_ref: Ref, kv_pairs_ref: Ref, q_norm_ref: Ref, kv_norm_ref: Ref,
        angles_refs: tuple[Ref, Ref], table_ref: Ref, positions_ref: Ref, *out_refs: Ref,
    ) -> None:  # fmt: skip
        if pages is None:
            values_ref, scales_ref, rows_ref = out_refs
        else:  # pages are an input that is written, and come before arrays that are only written
            rows_ref, values_ref, scales_ref = out_refs
        low_rank, token = lax.axis_index("low_rank"), lax.axis_index("token")

        def summed(ref: Ref, index: Index, layout: Layout) -> jax.Array:
            return _rounded([load(ref, (part, token, *index), layout) for part in range(ref.shape[0])])

        def normed(x: jax.Array, weight: Ref, layout: Layout) -> jax.Array:
            mean = jnp.sum(jnp.sum(x * x, axis=1)) * (1 / x.size)
            return x * lax.rsqrt(mean + eps) * load(weight, (), layout).astype(jnp.float32)

        def write(row: Ref) -> None:
            latent = summed(kv_ref, (pl.ds(0, _LATENTS),), LINES_OF)
            store(row.at[:_LATENTS, :], normed(latent, kv_norm_ref, LINES_OF).astype(jnp.bfloat16))
            if interleaved:
                places = [(pl.ds(RANK // 2, PAIRS), i) for i in range(2)]
            else:
                places = [(_LATENTS + i,) for i in range(2)]
            a, b = (summed(kv_pairs_ref, place, LINE_OF) for place in places)
            cos, sin = (load(ref, (token,), LINE_OF) for ref in angles_refs)
            store(row.at[_LATENTS, :], (a * cos - b * sin).astype(jnp.bfloat16))
            store(row.at[_LATENTS + 1, :], (a * sin + b * cos).astype(jnp.bfloat16))

        @pl.when(low_rank == 1)
        def _queries() -> None:
            x = summed(q_ref, (), norms.ROW)
            norms.write(normed(x, q_norm_ref, norms.ROW), values_ref.at[token], scales_ref.at[:, token])

        @pl.when(low_rank == 0)
        def _latents() -> None:
            if pages is None:
                write(rows_ref.at[token])
                return
            size, slot, position = pages.shape[1], lax.div(token, window), positions_ref[token]

            @pl.when((position >= 0) & (position < page_table.shape[1] * size))
            def _() -> None:
                write(rows_ref.at[table_ref[slot, lax.div(position, size)], lax.rem(position, size)])

    def lines(x: jax.Array, numbers: int = PAIRS) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, numbers)

    given = (
        *(lines(q, BLOCK), lines(kv), lines(kv, 2 if interleaved else PAIRS)),
        *(lines(q_norm, BLOCK), lines(kv_norm), angles, page_table, positions),
    )
    rows_type = [jax.ShapeDtypeStruct((tokens, _LATENTS + 2, PAIRS), jnp.bfloat16)] if pages is None else []
    run = plgpu.kernel(
        body,
        kernel_name="mla_low_rank",
        out_type=[*norms.quantised_type(tokens, width // BLOCK), *rows_type],
        grid=(2, tokens),
        grid_names=("low_rank", "token"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
    if pages is None:
        values, scales, rows = run(*given)
        return values, scales, rows.reshape(tokens, -1)
    written = jax.new_ref(lines(pages))
    values, scales = run(*given, written)
    return values, scales, jax.freeze(written).reshape(pages.shape)


def _rounded(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum rounded to bfloat16, as between two launches."""
    each = [x.astype(jnp.float32) for x in parts]
    return sum(each[1:], each[0]).astype(jnp.bfloat16).astype(jnp.float32)
