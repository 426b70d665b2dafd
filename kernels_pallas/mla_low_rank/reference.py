"""The operation in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.quantised import BLOCK, quantise


def mla_low_rank(
    q: Float[Array, "s T K"],
    kv: Float[Array, "u T c"],
    q_norm: Float[Array, " K"],
    kv_norm: Float[Array, " C"],
    angles: tuple[Float[Array, "T r"], Float[Array, "T r"]],
    pages: Float[Array, "P S c"] | None,
    page_table: Int[Array, "B n"],
    positions: Int[Array, " T"],
    *,
    eps: float,
    interleaved: bool,
) -> tuple[Array, Array, Array]:
    """`mosaic_gpu.mla_low_rank` for any rank and key; float32 but for sums of parts, and pages."""
    low = quantise(_norm(_sum(q), q_norm, eps))
    latent, key = jnp.split(_sum(kv), [kv_norm.shape[0]], axis=-1)
    rows = jnp.concatenate([_norm(latent, kv_norm, eps), _rotate(key, angles, interleaved)], axis=-1)
    out = rows if pages is None else write(rows, pages, page_table, positions)
    return low.values.reshape(q.shape[1], -1, BLOCK), low.scale, out


def write(
    rows: Float[Array, "T c"],
    pages: Float[Array, "P S c"],
    page_table: Int[Array, "B n"],
    positions: Int[Array, " T"],
) -> Float[Array, "P S c"]:
    """The pages, with the rows written whose positions lie within their slot's pages."""
    count, size, _ = pages.shape
    slots, columns = page_table.shape
    slot = jnp.arange(len(positions)) // (len(positions) // slots)
    page = page_table[slot, jnp.clip(positions // size, 0, columns - 1)]
    page = jnp.where((positions >= 0) & (positions < columns * size), page, count)
    return pages.at[page, positions % size].set(rows.astype(pages.dtype), mode="drop")


def _sum(parts: Float[Array, "s T d"]) -> Float[Array, "T d"]:
    return parts.astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16).astype(jnp.float32)


def _norm(x: Float[Array, "T d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "T d"]:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def _rotate(x: Float[Array, "T R"], angles: tuple[Array, Array], interleaved: bool) -> Float[Array, "T R"]:
    """Rotate pairs, first numbers first: neighbours, or number i of each half (arXiv 2104.09864, eq. 34)."""
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = angles
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
