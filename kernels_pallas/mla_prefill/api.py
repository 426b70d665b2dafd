"""The functions that a model calls."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mla_prefill import mosaic_gpu, reference
from kernels_pallas.mla_prefill.sizes import KEYS, QUERIES, ROPE, key_widths, value_widths
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.visible import Window

# Rows whose keys and values are in memory at a time; for a slot's 128 heads they take 0.5 GB in bfloat16.
BLOCK = 8192
# The kernel's rows are a multiple of the most keys of a step.
_ROWS = max(KEYS)


class Blocks(NamedTuple):
    """The slots' rows in order, block by block: no other rows are ever in memory.

    Attributes:
        read: the rows of block i, [B, size, C + R], latent first; zero where no query sees them.
        size: number of rows of a block.
        count: number of blocks up to the last row that some query sees; the int 1 where one block is all.
    """

    read: Callable[[jax.Array | int], jax.Array]
    size: int
    count: jax.Array | int


def mla_prefill(
    q: jax.Array,
    blocks: Blocks,
    k_up: jax.Array,
    v_up: jax.Array,
    visible: Window,
    *,
    scale: float,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> jax.Array:
    """Naive multi-head latent attention over cached rows (arXiv 2405.04434, eqs. 9-19).

    Keys and values are expanded for one block at a time; the blocks' outputs are merged by their sums of
    exponentials. Blocks that no query sees are neither read nor computed.

    Args:
        q: queries, [B, T, N, h + R].
        blocks: the slots' rows, this chunk's among them.
        k_up: [N, h, C].
        v_up: [N, v, C].
        visible: rows that each query sees: a chain.
        scale: factor of the scores before the softmax.
        implementation: see `attend`.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        [B, T, N, v] of q's dtype; zero where a query that counts sees no row.

    Raises:
        ValueError: inputs that the implementation cannot take.
    """
    rank = k_up.shape[-1]

    def part(i: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        latent, k_rope = jnp.split(blocks.read(i), [rank], axis=-1)
        k = jnp.einsum("blc,nhc->blnh", latent, k_up)
        v = jnp.einsum("blc,nvc->blnv", latent, v_up)
        here = visible.shifted(i * blocks.size)
        return attend(q, k, k_rope, v, here, scale=scale, implementation=implementation, interpret=interpret)

    def add(i: jax.Array, merged: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return merge(merged, part(i))

    out, lse = part(0)
    if not isinstance(blocks.count, int):
        out, _ = lax.fori_loop(1, blocks.count, add, (out.astype(jnp.float32), lse))
    return out.astype(q.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    k_rope: jax.Array,
    v: jax.Array,
    visible: Window,
    *,
    scale: float,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every query over one block of rows, with the sums that merging blocks needs.

    Args:
        q: [B, T, N, h + R].
        k: [B, L, N, h]; finite, also in rows that no query sees.
        k_rope: [B, L, R], shared by the heads.
        v: [B, L, N, v]; finite likewise.
        visible: rows that each query sees: a chain, its rows numbered within the block.
        scale: factor of the scores before the softmax.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, R 64, and widths h and v that
            `sizes.key_widths` and `sizes.value_widths` list: multiples of 64 with room in shared memory, v at
            most 256.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        The output [B, T, N, v] of q's dtype, and log2 of the sum of exponentials of each query's scores,
        float32 [B, N, T], -1e30 if it sees nothing. Results of queries past the count are anything finite.

    Raises:
        ValueError: inputs that the implementation cannot take.
    """
    if implementation == "xla":
        out, lse = reference.attend(q, k, k_rope, v, visible, scale=scale)
        return out.astype(q.dtype), lse
    check(q, k, k_rope, v)
    length = q.shape[1]

    def filled(x: jax.Array, to: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % to), *((0, 0),) * (x.ndim - 2)))

    out, lse = mosaic_gpu.mla_prefill(
        filled(q, QUERIES),
        filled(k, _ROWS),
        filled(k_rope, _ROWS),
        filled(v, _ROWS),
        bounds(visible, k.shape[1]),
        scale=scale,
        interpret=interpret,
    )
    return out[:, :length], lse[..., :length]


def bounds(visible: Window, rows: int) -> jax.Array:
    """The kernel's limits of a chain over ``rows`` rows, int32 [4, B]: count, first row, diagonal, end."""
    if visible.ancestors is not None:
        raise ValueError("mla_prefill on mosaic_gpu: tokens are a tree, must be a chain; use 'xla'")
    first, end = jnp.clip(visible.first, 0, rows), jnp.minimum(visible.end(), rows)
    return jnp.stack([visible.count, first, visible.length - 1, end])


def merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge two disjoint blocks: their output, float32, and log2 of the sums of exponentials."""
    peak = jnp.maximum(one[1], other[1])
    weights = [jnp.exp2(lse - peak) for _, lse in (one, other)]
    total = weights[0] + weights[1]
    shares = [(w / total).transpose(0, 2, 1)[..., None] for w in weights]
    return one[0] * shares[0] + other[0] * shares[1], peak + jnp.log2(total)


def check(q: ArrayOrShape, k: ArrayOrShape, k_rope: ArrayOrShape, v: ArrayOrShape) -> None:
    """Refuse inputs that the Mosaic GPU kernel cannot take, with a ValueError that says so."""
    own, shared = k.shape[-1], k_rope.shape[-1]
    need(
        "mla_prefill",
        ("the set of dtypes", {str(x.dtype) for x in (q, k, k_rope, v)}, ({"bfloat16"},)),
        ("width of the shared key", shared, (ROPE,)),
        ("width of a head's own key", own, key_widths()),
        ("width of a query", q.shape[-1], (own + shared,)),
        (f"width of a value beside keys of {own} + {shared}", v.shape[-1], value_widths(own)),
    )
