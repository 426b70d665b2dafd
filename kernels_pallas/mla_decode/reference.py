"""The operation in jnp: every slot's rows gathered, scores of all heads, one softmax."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mla_decode.fp8_rows import PackedRows, unpack
from kernels_pallas.visible import Window

EXACT = lax.Precision.HIGHEST


def mla_decode(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    visible: Window,
    *,
    scale: float,
) -> jax.Array:
    """`kernels_pallas.mla_decode.api.mla_decode`, computed in float32; returns float32 [B, W, N, C]."""
    rank, whole = q.shape[-1], jnp.concatenate([q, q_rope], axis=-1)
    rows = jax.tree.map(lambda part: part[page_table], pages)
    # FP8 rows are expanded to the type that is multiplied.
    rows = unpack(rows, rank).astype(q.dtype) if isinstance(rows, tuple) else rows
    rows = rows.astype(jnp.float32)
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    mask = visible.mask(q.shape[1], rows.shape[1])
    # Rows that no token sees may hold NaN, which a probability of zero does not silence.
    rows = jnp.where(visible.seen(rows.shape[1])[..., None], rows, 0)
    scores = jnp.einsum("bwnc,blc->bwnl", whole.astype(jnp.float32), rows, precision=EXACT) * scale
    scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    # A token that sees nothing must give zeros, not NaN.
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - peak)
    weights /= jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    return jnp.einsum("bwnl,blc->bwnc", weights, rows[..., :rank], precision=EXACT)
