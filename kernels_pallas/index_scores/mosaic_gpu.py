"""Index scores for Hopper, after DeepGEMM's sm90_fp8_paged_mqa_logits (github.com/deepseek-ai/DeepGEMM).

Keys are the rows of a product, heads its columns. Unlike in DeepGEMM, queries stay bfloat16, and FP8 keys are
expanded to bfloat16.

A thread block owns some window tokens of a slot and a share of its rows. A warpgroup copies tiles of 64 keys
into a ring; two multiply, a tile each, token after token: 64 x heads scores, whose weighted sum over the
heads is within a warp's registers. While one warpgroup sums, the other multiplies.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.index_scores.index_rows import PackedKeys
from kernels_pallas.mosaic import (
    WGMMA_COLUMN,
    WGMMA_ROWS,
    Interpreter,
    Ref,
    Warpgroup,
    load,
    operand_tiles,
    per_column,
    store,
)

TILE = WGMMA_ROWS
DIM = 128
COMPUTE = 2
_STAGES = 6
# Columns of queries: the most rows that their copy may have, and their weights fill a quarter of the
# registers.
MOST_COLUMNS = 256
# The bits of an e4m3 number in the place of a float16's are 2^-8 of it, also of a subnormal number.
_E4M3_IN_F16 = 256.0

# Lines of the integer array with the rows that a token sees: the first row; the end of the rows of which it
# sees all; bits, which of the next 31 it sees; and the end of the rows that any token of its slot sees.
FIRST, END, AHEAD, LAST = range(4)


def index_scores(
    q: Float[Array, "B g c i"],
    weights: Float[Array, "B g c"],
    keys: Float[Array, "P S i"] | PackedKeys,
    page_table: Int[Array, "B n"],
    seen: Int[Array, "lines B w"],
    *,
    heads: int,
    splits: int,
    interpret: Interpreter | None = None,
) -> Float[Array, "B w L"]:
    """Scores [B, w, L] of rows for tokens, L the slots' rows rounded up to whole tiles.

    Args:
        q: bfloat16; g groups of c = tokens x ``heads`` columns, w = g x tokens in all.
        weights: float32.
        keys: bfloat16, or FP8: uint8 [P, S, i] and float32 scales [P, S]. S divides TILE or is a multiple.
        page_table: int32.
        seen: int32, see above.
        heads: index heads.
        splits: number of parts that a slot's rows are divided into.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    slots, groups, columns, _ = q.shape
    fp8 = isinstance(keys, tuple)
    stored = keys if fp8 else (keys,)
    size, count, tokens = stored[0].shape[1], page_table.shape[1], columns // heads
    tiles = -(-count * size // TILE)
    copy_rows = min(size, TILE)
    wg = Warpgroup(interpret is not None)

    def body(
        q_ref: Ref, weights_ref: Ref, keys_refs: tuple[Ref, ...], table_ref: Ref, seen_ref: Ref, out_ref: Ref,
        q_s: Ref, ring_s: tuple[Ref, ...], expanded_s: tuple[Ref, ...],
        q_ready: Ref, ready: Ref, freed: Ref,
    ) -> None:  # fmt: skip
        slot, group, split = (lax.axis_index(name) for name in ("slot", "group", "split"))
        role = lax.axis_index("warpgroup")
        used = jnp.minimum(lax.div(seen_ref[LAST, slot, 0] + (TILE - 1), TILE), tiles)
        scored, blank = _share(0, used, split, splits), _share(used, tiles, split, splits)

        def copy() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[slot, group], q_s, q_ready)

            def tile(i: jax.Array, _: None) -> None:
                stage = lax.rem(i, _STAGES)
                pl.when(i >= _STAGES)(lambda: plgpu.barrier_wait(freed.at[stage]))
                for part in range(TILE // copy_rows):
                    row = (scored.first + i) * TILE + part * copy_rows
                    page = table_ref[slot, jnp.minimum(lax.div(row, size), count - 1)]
                    there, here = pl.ds(lax.rem(row, size), copy_rows), pl.ds(part * copy_rows, copy_rows)
                    for pages, ring in zip(keys_refs, ring_s, strict=True):
                        plgpu.copy_gmem_to_smem(pages.at[page, there], ring.at[stage, here], ready.at[stage])

            def drain(i: jax.Array, _: None) -> None:
                plgpu.barrier_wait(freed.at[lax.rem(i, _STAGES)])

            lax.fori_loop(0, scored.count, tile, None)
            # No warpgroup may leave while another still arrives at a barrier.
            lax.fori_loop(jnp.maximum(scored.count - _STAGES, 0), scored.count, drain, None)

        def expand(stage: jax.Array, mine: int) -> jax.Array:
            """A tile's FP8 keys to bfloat16, without their scales, which are returned; frees the stage."""
            scales = wg.row(ring_s[1].at[stage])
            for half in range(2):
                at = pl.ds(half * (DIM // 2), DIM // 2)
                byte = wg.laid_out(ring_s[0][stage, :, at]).astype(jnp.uint16)
                bits = (byte & 0x7F) << 7 | (byte & 0x80) << 8
                value = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * _E4M3_IN_F16
                value = jnp.where((byte & 0x7F) == 0x7F, jnp.nan, value)
                expanded_s[0][mine, :, at] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(freed.at[stage])
            return scales

        def compute(mine: int) -> None:
            each = [group * tokens + t for t in range(tokens)]
            of_heads = [
                load(weights_ref, (slot, group, pl.ds(t * heads, heads)), WGMMA_COLUMN) for t in range(tokens)
            ]
            sees = [[seen_ref[line, slot, token] for line in (FIRST, END, AHEAD)] for token in each]

            def tile(j: jax.Array, _: None) -> None:
                i = COMPUTE * j + mine
                stage, at = lax.rem(i, _STAGES), scored.first + i
                plgpu.barrier_wait(ready.at[stage])
                scales = expand(stage, mine) if fp8 else None
                row = wg.iota((TILE,), 0) + at * TILE
                for t, token in enumerate(each):
                    found = wg.product(
                        (TILE, heads),
                        lambda t=t: (
                            expanded_s[0].at[mine] if fp8 else ring_s[0].at[stage],
                            q_s.at[pl.ds(t * heads, heads)],
                        ),
                    )
                    if not fp8 and t == tokens - 1:
                        plgpu.barrier_arrive(freed.at[stage])
                    # Not a maximum, of which XLA on a CPU, where this is interpreted, makes 0 for NaN.
                    found = jnp.where(found < 0.0, 0.0, found) * per_column(of_heads[t], TILE)
                    total = jnp.sum(found, axis=1)
                    # Scales are positive, so they may be applied after the products.
                    total = total if scales is None else total * scales
                    total = jnp.where(total != total, jnp.inf, total)
                    first, end, ahead = sees[t]
                    bit = lax.shift_right_logical(jnp.full_like(row, ahead), jnp.clip(row - end, 0, 31)) & 1
                    visible = (row >= first) & ((row < end) | (bit == 1))
                    rows = pl.ds(at * TILE, TILE)
                    store(out_ref.at[slot, token, rows], jnp.where(visible, total, -jnp.inf))

            def fill(j: jax.Array, _: None) -> None:
                rows = pl.ds((blank.first + COMPUTE * j + mine) * TILE, TILE)
                for token in each:
                    store(out_ref.at[slot, token, rows], wg.full((TILE,), -jnp.inf))

            lax.fori_loop(0, lax.div(blank.count - mine + 1, COMPUTE), fill, None)
            plgpu.barrier_wait(q_ready)
            lax.fori_loop(0, lax.div(scored.count - mine + 1, COMPUTE), tile, None)

        @pl.when(role == COMPUTE)
        def _copy() -> None:
            plgpu.set_max_registers(40, action="decrease")
            copy()

        for mine in range(COMPUTE):

            @pl.when(role == mine)
            def _compute(mine: int = mine) -> None:
                plgpu.set_max_registers(232, action="increase")
                compute(mine)

    ring = [plgpu.SMEM((_STAGES, TILE, DIM), stored[0].dtype, transforms=operand_tiles(q.dtype))]
    expanded = []
    if fp8:
        # Half as wide as bfloat16 in the same tiles, which are read half by half.
        half = plgpu.TilingTransform((8, DIM // 2)), plgpu.SwizzleTransform(DIM // 2)
        ring = [plgpu.SMEM((_STAGES, TILE, DIM), stored[0].dtype, transforms=half)]
        ring.append(plgpu.SMEM((_STAGES, TILE), jnp.float32))
        expanded.append(plgpu.SMEM((COMPUTE, TILE, DIM), q.dtype, transforms=operand_tiles(q.dtype)))
    run = plgpu.kernel(
        body,
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct((slots, groups * tokens, tiles * TILE), jnp.float32),
        scratch_types=[
            plgpu.SMEM((columns, DIM), q.dtype, transforms=operand_tiles(q.dtype)),
            tuple(ring),
            tuple(expanded),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=_STAGES, num_arrivals=TILE // copy_rows * len(ring)),
            plgpu.Barrier(num_barriers=_STAGES),
        ],
        # The last axis starts first: blocks that read the same pages run side by side and share the L2 cache.
        grid=(slots, splits, groups),
        grid_names=("slot", "split", "group"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return run(q, weights, stored, page_table, seen)


@dataclass(frozen=True)
class _Tiles:
    """Tiles of a thread block."""

    first: jax.Array
    count: jax.Array


def _share(first: jax.Array | int, last: jax.Array | int, split: jax.Array, splits: int) -> _Tiles:
    """The part of tiles ``first`` to, not including, ``last`` that a split has."""
    each = lax.div(last - first + (splits - 1), splits)
    start = jnp.minimum(first + split * each, last)
    return _Tiles(start, jnp.minimum(start + each, last) - start)
