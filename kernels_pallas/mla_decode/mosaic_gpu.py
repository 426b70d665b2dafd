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
from kernels_pallas.mla_decode.thread_block import (
    COMPUTE,
    FIRST,
    HALF,
    LENGTH,
    PAGE,
    RANK,
    ROPE,
    ROWS,
    SEEN,
    Barriers,
    InputRefs,
    Scratch,
    ThreadBlock,
    piece,
    share_of,
)
from kernels_pallas.mosaic import NO_PEAK, Interpreter, Ref, RunningSoftmax, Warpgroup, operand_tiles, per_row

PARTS = HALF // ROPE
SCALES = RANK // BLOCK
LOG2E = 1.4426950408889634
# The bits of an e4m3 number in the place of a float16's are 2^-8 of it, also of a subnormal number.
E4M3_IN_F16 = 256.0

# With jax 0.10 a kernel cannot write to its inputs.
CAN_REUSE = jax.__version_info__ >= (0, 11)


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
        splits: number of parts that the rows are divided into.
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
        q: Ref, q_rope: Ref, pages: tuple[Ref, ...], table: Ref, rows: Ref, ahead: Ref,
        lse: Ref, out: tuple[Ref, ...], held: Scratch, barriers: Barriers,
    ) -> None:  # fmt: skip
        given, share = InputRefs(q, q_rope, pages, table, rows, ahead), share_of(rows, splits, count)
        b = ThreadBlock(wg, scale, share, given, held, barriers, out, lse)
        role = lax.axis_index("warpgroup")

        @pl.when(role == COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            copy(b)

        for half in range(COMPUTE):

            @pl.when(role == half)
            def _(half: int = half) -> None:
                plgpu.set_max_registers(240, action="increase")
                compute(b, half)

    tiles, per_buffer = operand_tiles(q.dtype), plgpu.SMEM((COMPUTE, ROWS), jnp.float32)
    of_each, of_halves = (plgpu.Barrier(num_barriers=n) for n in (COMPUTE, COMPUTE * COMPUTE))
    run = plgpu.kernel(
        kernel,
        kernel_name="mla_decode",
        out_type=(
            jax.ShapeDtypeStruct((splits, *ahead.shape), jnp.float32),
            () if in_place else (jax.ShapeDtypeStruct((splits, slots, height, RANK), q.dtype),),
        ),
        scratch_types=[
            Scratch(
                q=plgpu.SMEM((ROWS, RANK), q.dtype, transforms=tiles),
                q_rope=plgpu.SMEM((ROWS, ROPE), q.dtype, transforms=tiles),
                ahead=plgpu.SMEM((ROWS,), jnp.int32),
                latent=plgpu.SMEM((COMPUTE, COMPUTE, PAGE, HALF), q.dtype, transforms=tiles),
                rope=plgpu.SMEM((COMPUTE, PAGE, ROPE), q.dtype, transforms=tiles),
                peak=per_buffer,
                decay=per_buffer,
                total=per_buffer,
            ),
            Barriers(
                q=plgpu.Barrier(num_arrivals=3),
                latent=of_halves,
                rope=of_each,
                latent_freed=of_halves,
                rope_freed=plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=COMPUTE),
                probs=of_each,
                sums=plgpu.Barrier(num_arrivals=COMPUTE),
            ),
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


# The warpgroup that copies


def copy(b: ThreadBlock) -> None:
    """Copy the queries, then all pages, each piece when the one before it in its place is free."""
    share, given, held, barriers = b.share, b.given, b.held, b.barriers
    plgpu.copy_gmem_to_smem(given.q.at[share.slot, share.mine], held.q.at[share.local], barriers.q)
    plgpu.copy_gmem_to_smem(given.q_rope.at[share.slot, share.mine], held.q_rope.at[share.local], barriers.q)
    plgpu.copy_gmem_to_smem(given.ahead.at[share.slot, share.block], held.ahead, barriers.q)

    def step(i: jax.Array, _: None) -> None:
        for buffer in range(COMPUTE):
            # An odd last page is copied twice; the mask hides the second copy.
            page = given.table[share.slot, jnp.minimum(COMPUTE * (share.start + i) + buffer, share.pages - 1)]
            rows = given.pages[0].at[page]
            for half in range(COMPUTE):
                at = piece(buffer, half)
                pl.when(i > 0)(lambda freed=barriers.latent_freed.at[at]: plgpu.barrier_wait(freed))
                if b.fp8 and half == 0:  # words fill the second half, and are expanded into both
                    continue
                columns = rows.at[:, pl.ds(0 if b.fp8 else half * HALF, HALF)]
                plgpu.copy_gmem_to_smem(columns, held.latent.at[buffer, half], barriers.latent.at[at])
            pl.when(i > 0)(lambda freed=barriers.rope_freed.at[buffer]: plgpu.barrier_wait(freed))
            rope = rows.at[:, pl.ds(HALF if b.fp8 else RANK, ROPE)]
            plgpu.copy_gmem_to_smem(rope, held.rope.at[buffer], barriers.rope.at[buffer])

    lax.fori_loop(0, share.steps, step, None)

    @pl.when(share.steps > 0)
    def _() -> None:
        for buffer in range(COMPUTE):
            for half in range(COMPUTE):
                plgpu.barrier_wait(barriers.latent_freed.at[piece(buffer, half)])
            plgpu.barrier_wait(barriers.rope_freed.at[buffer])


# The warpgroups that compute


def compute(b: ThreadBlock, half: int) -> None:
    """Score every second page, and make one half of the output of all pages."""
    wg = b.wg
    plgpu.barrier_wait(b.barriers.q)
    carry = wg.full((ROWS,), NO_PEAK), wg.full((ROWS,), 0.0), wg.full((ROWS, HALF), 0.0)
    step = partial(odd_step if half else even_step, b)
    finish(b, half, *lax.fori_loop(0, b.share.steps, step, carry))


def even_step(b: ThreadBlock, i: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
    """Score the first page of step i; mix both pages into the first half of the output."""
    peak, total, acc = carry
    s = scores(b, 0, COMPUTE * (b.share.start + i))
    new = jnp.maximum(peak, s.max(axis=1))
    decay = jnp.exp2(peak - new)
    probs = jnp.exp2(s - per_row(new, PAGE))
    publish(b, 0, new, decay, probs)
    total = total * decay + probs.sum(axis=1)
    acc = mix(b, acc, decay, 0, 0)
    plgpu.barrier_wait(b.barriers.probs.at[1])
    new, decay = b.wg.row(b.held.peak.at[1]), b.wg.row(b.held.decay.at[1])
    return new, total * decay, mix(b, acc, decay, 1, 0)


def odd_step(b: ThreadBlock, i: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
    """Score the second page of step i, after the first; mix both pages into the second half of the output."""
    unused, total, acc = carry
    s = scores(b, 1, COMPUTE * (b.share.start + i) + 1)
    peak = s.max(axis=1)
    plgpu.barrier_wait(b.barriers.probs.at[0])
    before, even_decay = b.wg.row(b.held.peak.at[0]), b.wg.row(b.held.decay.at[0])
    new = jnp.maximum(before, peak)
    decay = jnp.exp2(before - new)
    probs = jnp.exp2(s - per_row(new, PAGE))
    publish(b, 1, new, decay, probs)
    total = total * even_decay * decay + probs.sum(axis=1)
    return unused, total, mix(b, mix(b, acc, even_decay, 0, 1), decay, 1, 1)


def scores(b: ThreadBlock, buffer: int, page: jax.Array) -> jax.Array:
    """Scores [64, 64] of a page's rows, in powers of two, -inf where a token does not see a row."""
    wg, held, barriers = b.wg, b.held, b.barriers
    # The scales are requested before the wait for the page, which hides their latency.
    if b.fp8:
        scales = scales_of(b, page)
        plgpu.barrier_wait(barriers.latent.at[piece(buffer, 1)])
        expand(b, buffer, scales)

    def latents(half: int) -> tuple[Ref, Ref]:
        if not b.fp8:
            plgpu.barrier_wait(barriers.latent.at[piece(buffer, half)])
        return held.q.at[:, pl.ds(half * HALF, HALF)], held.latent.at[buffer, half]

    def rope() -> tuple[Ref, Ref]:
        plgpu.barrier_wait(barriers.rope.at[buffer])
        return held.q_rope, held.rope.at[buffer]

    s = wg.product((ROWS, PAGE), partial(latents, 0), partial(latents, 1), rope)
    s = s * (b.scale * LOG2E)
    # Only the first and the last pages need a mask.
    at_edge = (page >= b.share.whole_to) | (page < b.share.whole_from)
    return lax.cond(at_edge, partial(masked, b, buffer, page), lambda s: s, s)


def masked(b: ThreadBlock, buffer: int, page: jax.Array, s: jax.Array) -> jax.Array:
    """Scores of visible rows; in shared memory, latents of rows that no token sees become 0."""
    wg, latent = b.wg, b.held.latent
    first, length, seen = (b.given.rows[line, b.share.slot, b.share.block] for line in (FIRST, LENGTH, SEEN))

    def visible(row: jax.Array, bits: jax.Array) -> jax.Array:
        bit = lax.shift_right_logical(bits, jnp.clip(row - length, 0, 31)) & 1
        return (row >= first) & ((row < length) | (bit == 1))

    # Rows that no token sees may hold NaN, which a probability of 0 does not silence.
    def silence(j: jax.Array, _: None) -> None:
        part = latent.at[buffer, lax.div(j, PARTS), :, pl.ds(lax.rem(j, PARTS) * ROPE, ROPE)]
        row = wg.iota((PAGE, ROPE), 0) + page * PAGE
        kept = visible(row, jnp.full_like(row, seen))
        part[...] = jnp.where(kept, wg.laid_out(part[...]), 0).astype(part.dtype)

    lax.fori_loop(0, COMPUTE * PARTS, silence, None)
    row = wg.iota((ROWS, PAGE), 1) + page * PAGE
    bits = per_row(wg.row(b.held.ahead), PAGE)
    return jnp.where(visible(row, bits), s, -jnp.inf)


def scales_of(b: ThreadBlock, page: jax.Array) -> tuple[jax.Array, ...]:
    """Scales of the page's rows, block by block."""
    here = b.given.pages[1].at[b.given.table[b.share.slot, jnp.minimum(page, b.share.pages - 1)]]
    return tuple(b.wg.gathered_row(here.at[:, block]) * E4M3_IN_F16 for block in range(SCALES))


def expand(b: ThreadBlock, buffer: int, scales: tuple[jax.Array, ...]) -> None:
    """Words to the latents they hold: each thread replaces the words that it read."""
    latent = b.held.latent

    def value(byte: jax.Array, scale: jax.Array) -> jax.Array:
        bits = (byte & 0x7F) << 7 | (byte & 0x80) << 8
        f16 = lax.bitcast_convert_type(bits, jnp.float16)
        return (f16.astype(jnp.float32) * per_row(scale, ROPE)).astype(latent.dtype)

    for i in range(HALF // BLOCK):
        low, high = scales[i], scales[i + HALF // BLOCK]

        def part(j: jax.Array, _: None, i: int = i, low: jax.Array = low, high: jax.Array = high) -> None:
            columns = pl.ds(i * BLOCK + j * ROPE, ROPE)
            words = b.wg.laid_out(latent[buffer, 1, :, columns])
            words = lax.bitcast_convert_type(words, WORD)
            latent[buffer, 0, :, columns] = value(words & 0xFF, low)
            latent[buffer, 1, :, columns] = value(words >> 8, high)

        lax.fori_loop(0, BLOCK // ROPE, part, None)
    plgpu.commit_smem()


def publish(b: ThreadBlock, buffer: int, peak: jax.Array, decay: jax.Array, probs: jax.Array) -> None:
    """Give both warpgroups a page's probabilities, their peak, and the factor of the output before."""
    b.held.peak[buffer, :] = peak
    b.held.decay[buffer, :] = decay
    b.held.rope[buffer, :, :] = probs.astype(b.held.rope.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.barriers.probs.at[buffer])


def mix(b: ThreadBlock, acc: jax.Array, decay: jax.Array, buffer: int, half: int) -> jax.Array:
    """The output decayed, plus a page's probabilities times its latents, which are freed."""
    acc = b.wg.accumulated(
        acc * per_row(decay, HALF),
        lambda: (b.held.rope.at[buffer], b.held.latent.at[buffer, half]),
    )
    plgpu.barrier_arrive(b.barriers.latent_freed.at[piece(buffer, half)])
    plgpu.barrier_arrive(b.barriers.rope_freed.at[buffer])
    return acc


def finish(b: ThreadBlock, half: int, peak: jax.Array, total: jax.Array, acc: jax.Array) -> None:
    """Store a half of the output, and of the first half's warpgroup the sum of exponentials."""
    share, held = b.share, b.held
    held.total[half, :] = total
    plgpu.barrier_arrive(b.barriers.sums)
    plgpu.barrier_wait(b.barriers.sums)
    total = jnp.maximum(b.wg.row(held.total.at[0]) + b.wg.row(held.total.at[1]), 1e-30)
    # No warpgroup reads the pages any more, so the output is stored through their memory.
    held.latent[half, half, :, :] = (acc * per_row(1 / total, HALF)).astype(held.latent.dtype)
    if half == 0:
        held.decay[half, :] = peak + jnp.log2(total)
    plgpu.commit_smem()
    # Over the queries, which only this thread block reads, and both halves have read.
    out = b.out[0].at[share.split] if b.out else b.given.q
    columns = pl.ds(half * HALF, HALF)
    plgpu.copy_smem_to_gmem(held.latent.at[half, half, share.local], out.at[share.slot, share.mine, columns])
    if half == 0:
        plgpu.copy_smem_to_gmem(held.decay.at[half], b.lse.at[share.split, share.slot, share.block])
    plgpu.wait_smem_to_gmem(0)


def rows_per_block(height: int) -> int:
    """Query rows of a thread block: the largest multiple of 8 up to 64 that divides ``height``."""
    return max(rows for rows in range(8, ROWS + 1, 8) if height % rows == 0)
