"""Four warpgroups for 128 values of a head: one block of them, as e4m3 has a scale for.

Each warpgroup has 32 values. It reads their rows of the up-projection straight into registers, then merges
the parts of every fourth token; while it merges, the rows are under way. Merged latents lie in shared memory,
from which all take them: a warp multiplies a row at a time, each lane 16 of its 512 numbers. There
is no copy engine and no tensor core.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.mla_decode.merging import merged
from kernels_pallas.mosaic import Interpreter, Ref, Warpgroup, load, per_column
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm.mosaic_gpu import ROW, WARPS, quantised_type, write

RANK = 512
# More tokens multiply faster on tensor cores, as in `mla_absorb`.
MOST = 8
GROUPS = 4
# Values of a warpgroup.
EACH = BLOCK // GROUPS
# A warp holds a row of latents, each of its lanes 8 neighbouring numbers, 16 bytes, of every 256.
_ROWS = plgpu.Layout.TILED(Tiling(((WARPS, 256), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
# A warpgroup holds a row of latents, each of its threads four neighbouring numbers.
_LATENTS = plgpu.Layout.WG_STRIDED((RANK,), vec_size=4)


def mla_values(
    out: Float[Array, "s B M 512"],
    lse: Float[Array, "s B k 64"],
    v_up: Float[Array, "N v 512"],
    *,
    window: int,
    interpret: Interpreter | None = None,
) -> tuple[Float[Array, "R n 128"], Float[Array, "n R"]]:
    """Values of all heads in e4m3, and their scales, as ``rms_norm`` gives them; n = N * v / 128.

    Args:
        out: bfloat16, normalised results of parts of the rows; M = ``window`` * heads, perhaps more than N.
        lse: float32, log2 of the parts' sums of exponentials; the M query rows are k blocks of M / k.
        v_up: bfloat16, v a multiple of 128.
        window: number of tokens of a slot; B * ``window`` is at most MOST.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    _, slots, height, _ = out.shape
    heads, width, _ = v_up.shape
    tokens, blocks, per_block = slots * window, width // BLOCK, height // lse.shape[2]
    wg = Warpgroup(interpret is not None)

    def body(
        out_ref: Ref, lse_ref: Ref, v_up_ref: Ref, values_ref: Ref, scales_ref: Ref, **scratch: Ref
    ) -> None:
        mixed_s, values_s, met = (scratch[name] for name in ("mixed", "values", "met"))
        block, mine = lax.axis_index("block"), lax.axis_index("wg")
        head, first = lax.div(block, blocks), lax.rem(block, blocks) * BLOCK + mine * EACH
        rows = [load(v_up_ref, (head, pl.ds(first + i * WARPS, WARPS)), _ROWS) for i in range(EACH // WARPS)]

        def await_latents() -> None:
            plgpu.barrier_arrive(met.at[0])
            plgpu.barrier_wait(met.at[0])

        def await_values() -> None:
            plgpu.barrier_arrive(met.at[1])
            plgpu.barrier_wait(met.at[1])

        for turn in range(0, tokens, GROUPS):

            @pl.when(turn + mine < tokens)
            def _merge(token: jax.Array = turn + mine) -> None:
                row = lax.rem(token, window) * (height // window) + head
                zero = wg.laid_out(jnp.zeros((RANK,), jnp.float32), _LATENTS)
                latents = merged(out_ref, lse_ref, (lax.div(token, window), row), per_block, zero, _LATENTS)
                mixed_s[token] = latents.astype(jnp.bfloat16).astype(jnp.float32)

        await_latents()
        for i, up in enumerate(rows):
            wide = up.astype(jnp.float32)
            for token in range(tokens):
                latents = load(mixed_s, (token,), _ROWS.reduce(0))
                products = wide * wg.laid_out(per_column(latents, WARPS), _ROWS)
                values_s[token, pl.ds(mine * EACH + i * WARPS, WARPS)] = jnp.sum(products, axis=1)
        await_values()

        @pl.when(mine * WARPS < tokens)
        def _write() -> None:
            own = pl.ds(mine * WARPS, WARPS)
            values = load(values_s, (own,), ROW).astype(jnp.bfloat16).astype(jnp.float32)
            write(values, values_ref.at[own, block], scales_ref.at[block, own])

    run = plgpu.kernel(
        body,
        kernel_name="mla_values",
        out_type=quantised_type(tokens, heads * blocks),
        scratch_types={
            "mixed": plgpu.SMEM((tokens, RANK), jnp.float32),
            "values": plgpu.SMEM((-(-tokens // WARPS) * WARPS, BLOCK), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=2),
        },
        grid=(heads * blocks,),
        grid_names=("block",),
        num_threads=GROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    values, scales = run(out, lse, v_up)
    return values, scales
