"""The function that a model calls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.index_scores import mosaic_gpu, reference
from kernels_pallas.index_scores.index_rows import PackedKeys
from kernels_pallas.index_scores.mosaic_gpu import DIM, MOST_COLUMNS, TILE
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation
from kernels_pallas.splits import choose_splits
from kernels_pallas.visible import Window

# The cost of a split beside its rows, which is loading queries, in tiles.
SPLIT_COST = 4
# Least rows of a TMA copy of FP8 keys' scales, because of the alignment of its target.
_LEAST_FP8 = 32


def index_scores(
    q: Float[Array, "B W H i"],
    weights: Float[Array, "B W H"],
    keys: Float[Array, "P S i"] | PackedKeys,
    page_table: Int[Array, "B n"],
    visible: Window,
    *,
    implementation: Implementation,
    splits: int | None = None,
    interpret: Interpreter | None = None,
) -> Float[Array, "B W L"]:
    """Sums over heads of weight x relu(q . k), for every token and cached row (arXiv 2512.02556, eq. 1).

    Args:
        q: index queries.
        weights: float32.
        keys: index keys; or the two arrays of FP8 keys that `index_rows.pack` makes. Keys of rows that no
            token sees may have any value.
        page_table: pages of each slot in order, int32; every entry must be a page.
        visible: rows that tokens see, of the L = n * S of their slot.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, i = 128, heads in multiples of 8 up to 256,
            and pages of 8, 16, 32 or a multiple of 64 rows, at least 32 in FP8.
        splits: number of parts of a slot's rows that run at the same time; None: chosen.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        float32; -inf where a token does not see the row, and inf where a score that it sees is NaN.

    Raises:
        ValueError: inputs that the implementation cannot take.
    """
    if implementation == "xla":
        return reference.index_scores(q, weights, keys, page_table, visible)
    check(q, keys)
    slots, width, heads, _ = q.shape
    rows = page_table.shape[1] * jax.tree.leaves(keys)[0].shape[1]
    groups = -(-width * heads // (MOST_COLUMNS // heads * heads))
    tokens = -(-width // groups)
    more = groups * tokens - width

    def grouped(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))
        return padded.reshape(slots, groups, tokens * heads, *x.shape[3:])

    found = mosaic_gpu.index_scores(
        grouped(q),
        grouped(weights),
        (keys[0], keys[1][..., 0]) if isinstance(keys, tuple) else keys,
        page_table,
        _seen(visible, groups * tokens, rows),
        heads=heads,
        splits=splits or choose_splits(slots * groups, -(-rows // TILE), SPLIT_COST),
        interpret=interpret,
    )
    return found[:, :width, :rows]


def _seen(visible: Window, width: int, rows: int) -> Int[Array, "4 B W"]:
    """The rows that each of ``width`` tokens sees, for the kernel; tokens past the window see no row."""
    token = jnp.arange(width, dtype=jnp.int32)
    end, bits = visible.length[:, None], jnp.zeros((1, width), jnp.int32)
    if visible.ancestors is None:
        end = end + token
    else:
        bits = jnp.pad(visible.ancestors, ((0, 0), (0, width - visible.ancestors.shape[1])))
    counts = token < visible.count[:, None]
    shape = counts.shape
    # The last bit that a row is compared with is the sign bit, which is clear.
    end, bits = jnp.where(counts, end, -32), jnp.where(counts, bits, 0)
    first, last = (jnp.broadcast_to(x[:, None], shape) for x in (visible.first, visible.end()))
    return jnp.stack([first, end, bits, jnp.clip(last, 0, rows)]).astype(jnp.int32)


def check(q: ArrayOrShape, keys: ArrayOrShape | PackedKeys) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError; looks at shapes and dtypes."""
    fp8, rows = isinstance(keys, tuple), jax.tree.leaves(keys)[0]
    heads, size = q.shape[2], rows.shape[1]
    sizes = tuple(n for n in (8, 16, 32) if not fp8 or n >= _LEAST_FP8)
    needs = (
        ("dtype of queries", str(q.dtype), "bfloat16", q.dtype == jnp.bfloat16),
        ("dtype of keys", str(rows.dtype), "that of queries", fp8 or rows.dtype == q.dtype),
        ("dimensions of a head", q.shape[-1], DIM, q.shape[-1] == DIM),
        ("heads", heads, f"a multiple of 8 up to {MOST_COLUMNS}", not heads % 8 and heads <= MOST_COLUMNS),
        ("rows per page", size, f"one of {sizes} or a multiple of {TILE}", size in sizes or not size % TILE),
    )
    for what, got, allowed, right in needs:
        if not right:
            raise ValueError(f"index_scores on mosaic_gpu: {what} is {got}, must be {allowed}; use 'xla'")
