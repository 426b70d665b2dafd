"""The function that a model calls."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kernels_pallas.mla_decode import mosaic_gpu, reference
from kernels_pallas.mla_decode.fp8_rows import PackedRows
from kernels_pallas.mla_decode.merging import merge
from kernels_pallas.mla_decode.thread_block import COMPUTE, PAGE, RANK, ROPE, ROWS
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.splits import choose_splits
from kernels_pallas.visible import MAX_AHEAD, Window

# The cost of a split beside its rows (loading queries, merging an output), in steps of two pages.
_SPLIT_COST = 3
# A thread block's query rows are a multiple of 8, the columns that a product of a warpgroup grows by.
_HEADS = 8


def mla_decode(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    visible: Window,
    *,
    scale: float,
    implementation: Implementation,
    splits: int | None = None,
    in_place: bool = False,
    interpret: Interpreter | None = None,
) -> jax.Array:
    """Absorbed multi-head latent attention over a paged cache (arXiv 2405.04434, eqs. 9-19).

    Args:
        q: queries in the latent space, [B, W, N, C].
        q_rope: their rope part, [B, W, N, R].
        pages: the cache, [P, S, C + R], latent first; or FP8 rows, the two arrays that `fp8_rows.pack` makes.
            Rows that no token sees may hold any value, NaN too.
        page_table: pages of each slot in order, int32 [B, n]; every entry must be a page of the cache.
        visible: rows that each token attends to, among the n * S rows of its slot.
        scale: factor of the scores before the softmax.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, C 512, R 64 and pages of 64 rows. It
            computes heads of zeros, too, up to a multiple of 8.
        splits: number of parts of a slot's rows that run at the same time; None: chosen.
        in_place: whether the result may take the memory of q, which no other operation may read then; it does
            where slots are not split, with jax 0.11 or newer.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        The mixed latents of each head, [B, W, N, C], of q's dtype; zero in idle slots. Tokens that see
        nothing cost no page, unless they share a thread block with a token that sees rows.

    Raises:
        ValueError: inputs that the implementation cannot take.
    """
    if implementation == "xla":
        return reference.mla_decode(q, q_rope, pages, page_table, visible, scale=scale).astype(q.dtype)
    options: Any = {"splits": splits, "in_place": in_place, "interpret": interpret}
    given = q, q_rope, pages, page_table, visible
    parts = mla_decode_parts(given, scale=scale, implementation=implementation, **options)
    slots, window, heads, rank = q.shape
    mixed = parts.out[0] if len(parts.out) == 1 else merge(parts.out, parts.lse, interpret=interpret)
    return mixed.reshape(slots, window, -1, rank)[:, :, :heads]


@struct.dataclass
class MixedLatents:
    """Results of attention to disjoint parts of the rows, for a kernel that merges them.

    Attributes:
        out: normalised mixed latents of M query rows: window token by window token, the heads of each and
            heads of zeros beside each other, up to a multiple of 8.
        lse: float32, log2 of the sums of exponentials; the query rows are k blocks of M / k.
    """

    out: Float[Array, "s B M C"]
    lse: Float[Array, "s B k 64"]


def mla_decode_parts(
    given: tuple[jax.Array, jax.Array, jax.Array | PackedRows, jax.Array, Window],
    *,
    scale: float,
    implementation: Implementation,
    splits: int | None = None,
    in_place: bool = False,
    interpret: Interpreter | None = None,
) -> MixedLatents:
    """``mla_decode``, whose parts the reader merges. given: its first five arguments."""
    q, q_rope, pages, page_table, visible = given
    if implementation == "xla":
        mixed = reference.mla_decode(*given, scale=scale).astype(q.dtype)
        mixed = jnp.pad(mixed, ((0, 0), (0, 0), (0, -q.shape[2] % _HEADS), (0, 0)))
        out = mixed.reshape(1, len(mixed), -1, mixed.shape[-1])
        blocks = out.shape[2] // mosaic_gpu.rows_per_block(out.shape[2])
        return MixedLatents(out, jnp.zeros((1, len(mixed), blocks, ROWS), jnp.float32))
    check(q, q_rope, pages)
    q, q_rope = (jnp.pad(a, ((0, 0), (0, 0), (0, -a.shape[2] % _HEADS), (0, 0))) for a in (q, q_rope))
    slots, window, heads, _ = q.shape
    height = window * heads
    block = mosaic_gpu.rows_per_block(height)
    blocks = height // block
    splits = splits or splits_of(slots * blocks, page_table.shape[1])
    seen: Any = visible.bits(window, page_table.shape[1] * PAGE)
    # A block whose tokens see nothing reads no page, though other blocks of its slot do.
    reads = jnp.arange(blocks) * block < (seen.count * heads)[:, None]
    end = jnp.where(reads, seen.end()[:, None], 0)
    of_slot = (seen.first, seen.length, end, seen.seen_ahead())
    rows = jnp.stack([jnp.broadcast_to(a.reshape(slots, -1), (slots, blocks)) for a in of_slot])
    ahead = jnp.repeat(seen.ancestors, heads, axis=1).reshape(slots, blocks, block)
    ahead = jnp.pad(ahead, ((0, 0), (0, 0), (0, ROWS - block)))
    out, lse = mosaic_gpu.mla_decode(
        q.reshape(slots, height, -1),
        q_rope.reshape(slots, height, -1),
        pages,
        page_table,
        rows,
        ahead,
        scale=scale,
        splits=splits,
        in_place=in_place,
        interpret=interpret,
    )
    return MixedLatents(out, lse)


def splits_of(blocks: int, columns: int) -> int:
    """Number of splits that finishes soonest, for slots of ``columns`` pages; see ``choose_splits``."""
    return choose_splits(blocks, -(-columns // COMPUTE), _SPLIT_COST)


def check(q: ArrayOrShape, q_rope: ArrayOrShape, pages: ArrayOrShape | PackedRows) -> None:
    """Refuse inputs that the Mosaic GPU kernel cannot take, with a ValueError that says so."""
    (window, _, rank), rows = q.shape[-3:], jax.tree.leaves(pages)[0]
    dtypes = {str(q.dtype), str(q_rope.dtype)} | (set() if isinstance(pages, tuple) else {str(rows.dtype)})
    need(
        "mla_decode",
        ("dtype of queries and cache", dtypes, ({"bfloat16"},)),
        ("latent rank", rank, (RANK,)),
        ("rope dimensions", q_rope.shape[-1], (ROPE,)),
        ("rows per page", rows.shape[1], (PAGE,)),
        (f"tokens past the window's most, {MAX_AHEAD + 1},", max(window - MAX_AHEAD - 1, 0), (0,)),
    )
