"""Paged MLA decode for Hopper, after FlashMLA's schedule.

Source: github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md.

A thread block owns 64 query rows (window token x head) of one slot and one split of its cached rows. The
output, 64 x 512 in float32, fills half the register file, so two compute warpgroups hold one half each. Per
step they take two pages: each scores one, writes its probabilities to shared memory, over the page's rope
part, which is not needed any more, and both multiply both pages into their half. A third warpgroup copies the
pages.

A page is copied in three pieces: its two halves, one for each warpgroup's output, and its rope part. Scores
begin when the first half has arrived; a half of the next page is copied when its warpgroup has finished with
the present one.

A page of FP8 rows arrives as words over its second half; the warpgroup that scores it expands it in place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mla_decode.fp8_rows import BLOCK, WORD, PackedRows
from kernels_pallas.mosaic import (
    NO_PEAK,
    WGMMA_ROWS,
    Interpreter,
    Ref,
    RunningSoftmax,
    Warpgroup,
    operand_tiles,
    per_row,
)

RANK, ROPE, PAGE = 512, 64, 64
ROWS = WGMMA_ROWS
HALF = RANK // 2
COMPUTE = 2  # warpgroups; pages per step, and parts of the latents
PARTS = HALF // ROPE
SCALES = RANK // BLOCK
LOG2E = 1.4426950408889634
# The bits of an e4m3 number in the place of a float16's are 2^-8 of it, also of a subnormal number.
E4M3_IN_F16 = 256.0

# With jax 0.10 a kernel cannot write to its inputs.
CAN_REUSE = jax.__version_info__ >= (0, 11)

# Lines of the integer array that describes the rows of a slot that a thread block reads.
FIRST, LENGTH, END, SEEN = range(4)


def mla_decode(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    rows: jax.Array,
    ahead: jax.Array,
    *,
    scale: float,
    splits: int,
    in_place: bool = False,
    interpret: Interpreter | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each split over its share of the rows.

    Args:
        q: [B, M, 512] bf16, M a multiple of 8.
        q_rope: [B, M, 64] bf16.
        pages: [P, 64, 576] bf16, or FP8 rows: [P, 64, 320] uint16 and [P, 64, 4] float32.
        page_table: [B, n] int32.
        rows: [4, B, M / m] int32: the first row, the end of the rows that all tokens see, the end of the rows
            that any sees, and bits for the rows between the two ends that some token sees. A block whose last
            end is 0 reads no page, and gives zeros.
        ahead: [B, M / m, 64] int32, m of `rows_per_block`; the first m of a block: bit i is set if the query
            row sees cached row ``length + i``.
        scale: factor of the scores.
        splits: parts that the rows are divided into.
        in_place: the output takes the memory of q; not with splits.
        interpret: parameters of Pallas' interpreter, or None.

    Returns:
        Outputs [splits, B, M, 512] bf16, normalised per split, and log2 of their sums of exponentials,
        [splits, B, M / m, 64] float32, in each block's first m.
    """
    slots, height, _ = q.shape
    in_place = in_place and splits == 1 and CAN_REUSE
    count = rows_per_block(height)
    wg = Warpgroup(interpreted=interpret is not None)
    fp8 = isinstance(pages, tuple)
    # Words share the memory of values, and Mosaic GPU copies between equal types only.
    stored = (lax.bitcast_convert_type(pages[0], q.dtype), pages[1]) if fp8 else (pages,)

    def kernel(
        q_ref: Ref, q_rope_ref: Ref, pages_refs: tuple[Ref, ...], table_ref: Ref, rows_ref: Ref,
        ahead_ref: Ref, lse_ref: Ref, out_refs: tuple[Ref, ...],
        q_s: Ref, q_rope_s: Ref, ahead_s: Ref, latent_s: Ref, rope_s: Ref,
        peak_s: Ref, decay_s: Ref, sum_s: Ref,
        q_ready: Ref, latent_ready: Ref, rope_ready: Ref, latent_freed: Ref, rope_freed: Ref,
        probs_ready: Ref, sums_ready: Ref,
    ) -> None:  # fmt: skip
        block, split, slot = lax.axis_index("block"), lax.axis_index("split"), lax.axis_index("slot")
        num_pages = lax.div(rows_ref[END, slot, block] + (PAGE - 1), PAGE)
        # All tokens see the pages from the first to, not including, the second.
        whole_from = lax.div(rows_ref[FIRST, slot, block] + (PAGE - 1), PAGE)
        whole_to = lax.div(rows_ref[LENGTH, slot, block], PAGE)
        all_steps = lax.div(num_pages + (COMPUTE - 1), COMPUTE)
        share = lax.div(all_steps + (splits - 1), splits)
        start = split * share
        steps = jnp.maximum(jnp.minimum(start + share, all_steps) - start, 0)
        # In a page of fewer than 64 rows, further rows are computed from whatever shared memory holds, and
        # not stored.
        mine, local = pl.ds(block * count, count), pl.ds(0, count)

        def copy() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[slot, mine], q_s.at[local], q_ready)
            plgpu.copy_gmem_to_smem(q_rope_ref.at[slot, mine], q_rope_s.at[local], q_ready)
            plgpu.copy_gmem_to_smem(ahead_ref.at[slot, block], ahead_s, q_ready)

            def step(i: jax.Array, _: None) -> None:
                for buffer in range(COMPUTE):
                    # An odd last page is copied twice; the mask hides the second copy.
                    page = table_ref[slot, jnp.minimum(COMPUTE * (start + i) + buffer, num_pages - 1)]
                    rows = pages_refs[0].at[page]
                    for half in range(COMPUTE):
                        freed = latent_freed.at[piece(buffer, half)]
                        pl.when(i > 0)(lambda freed=freed: plgpu.barrier_wait(freed))
                        if fp8 and half == 0:  # words fill the second half, and are expanded into both
                            continue
                        columns = rows.at[:, pl.ds(0 if fp8 else half * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(
                            columns, latent_s.at[buffer, half], latent_ready.at[piece(buffer, half)]
                        )
                    pl.when(i > 0)(lambda freed=rope_freed.at[buffer]: plgpu.barrier_wait(freed))
                    rope = rows.at[:, pl.ds(HALF if fp8 else RANK, ROPE)]
                    plgpu.copy_gmem_to_smem(rope, rope_s.at[buffer], rope_ready.at[buffer])

            lax.fori_loop(0, steps, step, None)

            @pl.when(steps > 0)
            def _() -> None:
                for buffer in range(COMPUTE):
                    for half in range(COMPUTE):
                        plgpu.barrier_wait(latent_freed.at[piece(buffer, half)])
                    plgpu.barrier_wait(rope_freed.at[buffer])

        def scales_of(page: jax.Array) -> tuple[jax.Array, ...]:
            """Scales of the page's rows, block by block."""
            here = pages_refs[1].at[table_ref[slot, jnp.minimum(page, num_pages - 1)]]
            return tuple(wg.gathered_row(here.at[:, block]) * E4M3_IN_F16 for block in range(SCALES))

        def expand(buffer: int, scales: tuple[jax.Array, ...]) -> None:
            """Words to the latents they hold: each thread replaces the words that it read."""

            def value(byte: jax.Array, scale: jax.Array) -> jax.Array:
                bits = (byte & 0x7F) << 7 | (byte & 0x80) << 8
                f16 = lax.bitcast_convert_type(bits, jnp.float16)
                return (f16.astype(jnp.float32) * per_row(scale, ROPE)).astype(q.dtype)

            for i in range(HALF // BLOCK):
                low, high = scales[i], scales[i + HALF // BLOCK]

                def part(
                    j: jax.Array, _: None, i: int = i, low: jax.Array = low, high: jax.Array = high
                ) -> None:
                    columns = pl.ds(i * BLOCK + j * ROPE, ROPE)
                    words = wg.laid_out(latent_s[buffer, 1, :, columns])
                    words = lax.bitcast_convert_type(words, WORD)
                    latent_s[buffer, 0, :, columns] = value(words & 0xFF, low)
                    latent_s[buffer, 1, :, columns] = value(words >> 8, high)

                lax.fori_loop(0, BLOCK // ROPE, part, None)
            plgpu.commit_smem()

        def scores(buffer: int, page: jax.Array) -> jax.Array:
            # The scales are requested before the wait for the page, which hides their latency.
            if fp8:
                scales = scales_of(page)
                plgpu.barrier_wait(latent_ready.at[piece(buffer, 1)])
                expand(buffer, scales)

            def latents(half: int) -> tuple[Ref, Ref]:
                if not fp8:
                    plgpu.barrier_wait(latent_ready.at[piece(buffer, half)])
                return q_s.at[:, pl.ds(half * HALF, HALF)], latent_s.at[buffer, half]

            def rope() -> tuple[Ref, Ref]:
                plgpu.barrier_wait(rope_ready.at[buffer])
                return q_rope_s, rope_s.at[buffer]

            s = wg.product((ROWS, PAGE), partial(latents, 0), partial(latents, 1), rope)
            s = s * (scale * LOG2E)

            def masked(s: jax.Array) -> jax.Array:
                first, length, seen = (rows_ref[line, slot, block] for line in (FIRST, LENGTH, SEEN))

                def visible(row: jax.Array, bits: jax.Array) -> jax.Array:
                    bit = lax.shift_right_logical(bits, jnp.clip(row - length, 0, 31)) & 1
                    return (row >= first) & ((row < length) | (bit == 1))

                # Rows that no token sees may hold NaN, which a probability of 0 does not silence.
                def silence(j: jax.Array, _: None) -> None:
                    part = latent_s.at[buffer, lax.div(j, PARTS), :, pl.ds(lax.rem(j, PARTS) * ROPE, ROPE)]
                    row = wg.iota((PAGE, ROPE), 0) + page * PAGE
                    kept = visible(row, jnp.full_like(row, seen))
                    part[...] = jnp.where(kept, wg.laid_out(part[...]), 0).astype(part.dtype)

                lax.fori_loop(0, COMPUTE * PARTS, silence, None)
                row = wg.iota((ROWS, PAGE), 1) + page * PAGE
                bits = per_row(wg.row(ahead_s), PAGE)
                return jnp.where(visible(row, bits), s, -jnp.inf)

            # Only the first and the last pages need a mask.
            at_edge = (page >= whole_to) | (page < whole_from)
            return lax.cond(at_edge, masked, lambda s: s, s)

        def publish(buffer: int, peak: jax.Array, decay: jax.Array, probs: jax.Array) -> None:
            peak_s[buffer, :] = peak
            decay_s[buffer, :] = decay
            rope_s[buffer, :, :] = probs.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(probs_ready.at[buffer])

        def apply(acc: jax.Array, decay: jax.Array, buffer: int, half: int) -> jax.Array:
            """The output decayed, plus a page's probabilities times its latents, which are freed."""
            acc = wg.accumulated(
                acc * per_row(decay, HALF),
                lambda: (rope_s.at[buffer], latent_s.at[buffer, half]),
            )
            plgpu.barrier_arrive(latent_freed.at[piece(buffer, half)])
            plgpu.barrier_arrive(rope_freed.at[buffer])
            return acc

        def finish(half: int, peak: jax.Array, total: jax.Array, acc: jax.Array) -> None:
            sum_s[half, :] = total
            plgpu.barrier_arrive(sums_ready)
            plgpu.barrier_wait(sums_ready)
            total = jnp.maximum(wg.row(sum_s.at[0]) + wg.row(sum_s.at[1]), 1e-30)
            # No warpgroup reads the pages any more, so the output is stored through their memory.
            latent_s[half, half, :, :] = (acc * per_row(1 / total, HALF)).astype(q.dtype)
            if half == 0:
                decay_s[half, :] = peak + jnp.log2(total)
            plgpu.commit_smem()
            # Over the queries, which only this thread block reads, and both halves have read.
            out = out_refs[0].at[split] if out_refs else q_ref
            columns = pl.ds(half * HALF, HALF)
            plgpu.copy_smem_to_gmem(latent_s.at[half, half, local], out.at[slot, mine, columns])
            if half == 0:
                plgpu.copy_smem_to_gmem(decay_s.at[half], lse_ref.at[split, slot, block])
            plgpu.wait_smem_to_gmem(0)

        def even_step(i: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
            peak, total, acc = carry
            s = scores(0, COMPUTE * (start + i))
            new = jnp.maximum(peak, s.max(axis=1))
            decay = jnp.exp2(peak - new)
            probs = jnp.exp2(s - per_row(new, PAGE))
            publish(0, new, decay, probs)
            total = total * decay + probs.sum(axis=1)
            acc = apply(acc, decay, 0, 0)
            plgpu.barrier_wait(probs_ready.at[1])
            new, decay = wg.row(peak_s.at[1]), wg.row(decay_s.at[1])
            return new, total * decay, apply(acc, decay, 1, 0)

        def odd_step(i: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
            unused, total, acc = carry
            s = scores(1, COMPUTE * (start + i) + 1)
            peak = s.max(axis=1)
            plgpu.barrier_wait(probs_ready.at[0])
            before, even_decay = wg.row(peak_s.at[0]), wg.row(decay_s.at[0])
            new = jnp.maximum(before, peak)
            decay = jnp.exp2(before - new)
            probs = jnp.exp2(s - per_row(new, PAGE))
            publish(1, new, decay, probs)
            total = total * even_decay * decay + probs.sum(axis=1)
            return unused, total, apply(apply(acc, even_decay, 0, 1), decay, 1, 1)

        def compute(half: int) -> None:
            plgpu.barrier_wait(q_ready)
            carry = wg.full((ROWS,), NO_PEAK), wg.full((ROWS,), 0.0), wg.full((ROWS, HALF), 0.0)
            finish(half, *lax.fori_loop(0, steps, odd_step if half else even_step, carry))

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

    tiles, per_buffer = operand_tiles(q.dtype), (COMPUTE, ROWS)
    run = plgpu.kernel(
        kernel,
        kernel_name="mla_decode",
        out_type=(
            jax.ShapeDtypeStruct((splits, *ahead.shape), jnp.float32),
            () if in_place else (jax.ShapeDtypeStruct((splits, slots, height, RANK), q.dtype),),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, RANK), q.dtype, transforms=tiles),
            plgpu.SMEM((ROWS, ROPE), q.dtype, transforms=tiles),
            plgpu.SMEM((ROWS,), jnp.int32),
            plgpu.SMEM((COMPUTE, COMPUTE, PAGE, HALF), q.dtype, transforms=tiles),
            plgpu.SMEM((COMPUTE, PAGE, ROPE), q.dtype, transforms=tiles),
            plgpu.SMEM(per_buffer, jnp.float32),
            plgpu.SMEM(per_buffer, jnp.float32),
            plgpu.SMEM(per_buffer, jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=COMPUTE * COMPUTE),
            plgpu.Barrier(num_barriers=COMPUTE),
            plgpu.Barrier(num_barriers=COMPUTE * COMPUTE),
            plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=COMPUTE),
            plgpu.Barrier(num_barriers=COMPUTE),
            plgpu.Barrier(num_arrivals=COMPUTE),
        ],
        # The last axis starts first, so that blocks with the same pages run together and share the L2 cache.
        grid=(slots, splits, height // count),
        grid_names=("slot", "split", "block"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
    if not in_place:
        lse, (out,) = run(q, q_rope, stored, page_table, rows, ahead)
        return out, lse
    reused = jax.new_ref(q)
    lse, _ = run(reused, q_rope, stored, page_table, rows, ahead)
    return jax.freeze(reused)[None], lse


def piece(buffer: int, half: int) -> int:
    """The index of a half of a page among the barriers of both halves."""
    return buffer * COMPUTE + half


def rows_per_block(height: int) -> int:
    """Query rows of a thread block: the largest multiple of 8 up to 64 that divides ``height``."""
    return max(rows for rows in range(8, ROWS + 1, 8) if height % rows == 0)
