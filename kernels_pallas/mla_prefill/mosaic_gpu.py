"""Causal attention with keys and values expanded, for Hopper.

A thread block owns 128 queries of one head, 64 for each of two compute warpgroups, and walks over the keys in
blocks of 128, or of 64 where heads are wide; a third warpgroup copies. Probabilities are multiplied from
shared memory, not from registers: ptxas before 13.3 may reuse the registers of a running product
(github.com/triton-lang/triton/issues/9433).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mla_prefill.sizes import COMPUTE, PART, QUERIES, ROPE, ROWS, STAGES, HeadWidths
from kernels_pallas.mosaic import NO_PEAK, Interpreter, Ref, RunningSoftmax, Warpgroup, operand_tiles, per_row

LOG2E = 1.4426950408889634

# Lines of the integer array that describes a slot.
COUNT, BEGIN, DIAGONAL, END = range(4)


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    k_rope: jax.Array,
    v: jax.Array,
    limits: jax.Array,
    *,
    scale: float,
    interpret: Interpreter | None = None,
) -> list[jax.Array]:
    """Attention of every query over one block of rows.

    Args:
        q: [B, T, N, h + R] bf16, T a multiple of 128.
        k: [B, L, N, h] bf16, L a multiple of 128. Rows that no query sees must be finite.
        k_rope: [B, L, R] bf16, shared by the heads.
        v: [B, L, N, v] bf16.
        limits: [4, B] int32: queries that count; b, d and e: query t sees the rows from b up to d + t, only
            below e.
        scale: factor of the scores.
        interpret: parameters of Pallas' interpreter, or None.

    Returns:
        Outputs [B, T, N, v] bf16 and log2 of their sums of exponentials, [B, N, T] float32.
    """
    slots, length, heads, _ = q.shape
    sizes = HeadWidths(k.shape[-1], v.shape[-1])
    keys, width = sizes.keys, sizes.value
    wg = Warpgroup(interpreted=interpret is not None)

    def kernel(
        q_ref: Ref, k_ref: Ref, rope_ref: Ref, v_ref: Ref, limits_ref: Ref, out_ref: Ref, lse_ref: Ref,
        q_s: Ref, q_rope_s: Ref, k_s: Ref, k_rope_s: Ref, v_s: Ref, probs_s: Ref, lse_s: Ref,
        q_ready: Ref, k_ready: Ref, v_ready: Ref, k_freed: Ref, v_freed: Ref,
    ) -> None:  # fmt: skip
        # A head's last queries have the most keys: they start first.
        tile = length // QUERIES - 1 - lax.axis_index("tile")
        head, slot = lax.axis_index("head"), lax.axis_index("slot")
        count, begin = limits_ref[COUNT, slot], limits_ref[BEGIN, slot]
        diagonal, end = limits_ref[DIAGONAL, slot], limits_ref[END, slot]
        seen = jnp.minimum(end, diagonal + jnp.minimum(count, (tile + 1) * QUERIES))
        steps = jnp.where(tile * QUERIES < count, lax.div(jnp.maximum(seen, 0) + (keys - 1), keys), 0)

        def copy() -> None:
            for half in range(COMPUTE):
                mine = pl.ds(tile * QUERIES + half * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(
                    q_ref.at[slot, mine, head, pl.ds(0, sizes.key)], q_s.at[half], q_ready.at[half]
                )
                plgpu.copy_gmem_to_smem(
                    q_ref.at[slot, mine, head, pl.ds(sizes.key, ROPE)], q_rope_s.at[half], q_ready.at[half]
                )

            def step(i: jax.Array, _: None) -> None:
                stage, rows = lax.rem(i, STAGES), pl.ds(i * keys, keys)
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(k_freed.at[stage]))
                plgpu.copy_gmem_to_smem(k_ref.at[slot, rows, head], k_s.at[stage], k_ready.at[stage])
                plgpu.copy_gmem_to_smem(rope_ref.at[slot, rows], k_rope_s.at[stage], k_ready.at[stage])
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(v_freed.at[stage]))
                plgpu.copy_gmem_to_smem(v_ref.at[slot, rows, head], v_s.at[stage], v_ready.at[stage])

            lax.fori_loop(0, steps, step, None)

            def drain(i: jax.Array, _: None) -> None:
                plgpu.barrier_wait(k_freed.at[lax.rem(i, STAGES)])
                plgpu.barrier_wait(v_freed.at[lax.rem(i, STAGES)])

            lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, drain, None)

        def compute(half: int) -> None:
            mine = pl.ds(tile * QUERIES + half * ROWS, ROWS)
            last = diagonal + tile * QUERIES + half * ROWS  # last row that the first query sees

            def masked(i: jax.Array, s: jax.Array) -> jax.Array:
                row = wg.iota((ROWS, keys), 1) + i * keys
                seen = (row >= begin) & (row < end) & (row <= wg.iota((ROWS, keys), 0) + last)
                return jnp.where(seen, s, -jnp.inf)

            def step(i: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
                peak, total, acc = carry
                stage = lax.rem(i, STAGES)
                plgpu.barrier_wait(k_ready.at[stage])
                s = wg.product(
                    (ROWS, keys),
                    lambda: (q_s.at[half], k_s.at[stage]),
                    lambda: (q_rope_s.at[half], k_rope_s.at[stage]),
                )
                plgpu.barrier_arrive(k_freed.at[stage])
                s = s * (scale * LOG2E)
                at_edge = ((i + 1) * keys > jnp.minimum(end, last + 1)) | (i * keys < begin)
                s = lax.cond(at_edge, lambda s: masked(i, s), lambda s: s, s)
                new = jnp.maximum(peak, s.max(axis=1))
                decay = jnp.exp2(peak - new)
                probs = jnp.exp2(s - per_row(new, keys))
                total = total * decay + probs.sum(axis=1)
                probs = probs.astype(q.dtype)
                acc = acc * per_row(decay, width)
                for part in range(keys // PART):
                    columns = slice(part * PART, (part + 1) * PART)
                    probs_s[half, :, :] = probs[:, columns]
                    plgpu.commit_smem()
                    if part == 0:
                        plgpu.barrier_wait(v_ready.at[stage])
                    rows = pl.ds(part * PART, PART)
                    acc = wg.accumulated(acc, lambda rows=rows: (probs_s.at[half], v_s.at[stage, rows]))
                plgpu.barrier_arrive(v_freed.at[stage])
                return new, total, acc

            plgpu.barrier_wait(q_ready.at[half])
            carry = wg.full((ROWS,), NO_PEAK), wg.full((ROWS,), 0.0), wg.full((ROWS, width), 0.0)
            peak, total, acc = lax.fori_loop(0, steps, step, carry)
            total = jnp.maximum(total, 1e-30)
            out = (acc * per_row(1 / total, width)).astype(q.dtype)
            # Queries and probabilities are not read any more, so the output is stored through their memory.
            memory = zip((q_s, q_rope_s, probs_s), sizes.stored(), strict=True)
            used = [(staged, columns) for staged, columns in memory if columns.stop > columns.start]
            for staged, columns in used:
                staged[half, :, :] = out[:, columns]
            lse_s[half, :] = peak + jnp.log2(total)
            plgpu.commit_smem()
            for staged, columns in used:
                plgpu.copy_smem_to_gmem(staged.at[half], out_ref.at[slot, mine, head, columns])
            plgpu.copy_smem_to_gmem(lse_s.at[half], lse_ref.at[slot, head, mine])
            plgpu.wait_smem_to_gmem(0)

        role = lax.axis_index("warpgroup")

        @pl.when(role == COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            copy()

        for half in range(COMPUTE):

            @pl.when(role == half)
            def _(half: int = half) -> None:
                plgpu.set_max_registers(240, action="increase")
                compute(half)

    tiles = operand_tiles(q.dtype)
    run = plgpu.kernel(
        kernel,
        kernel_name="mla_prefill",
        out_type=[
            jax.ShapeDtypeStruct((slots, length, heads, width), q.dtype),
            jax.ShapeDtypeStruct((slots, heads, length), jnp.float32),
        ],
        scratch_types=[
            *(plgpu.SMEM(shape, q.dtype, transforms=tiles) for shape in sizes.operands(keys)),
            plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=COMPUTE),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=COMPUTE),
        ],
        # The last axis starts first: a head's tiles run side by side and share its keys in the L2 cache.
        grid=(slots, heads, length // QUERIES),
        grid_names=("slot", "head", "tile"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
    return run(q, k, k_rope, v, limits)
