"""Cached rows with FP8 latents: 656 bytes of DeepSeek-V3's instead of 1152, in two arrays.

    words, uint16    [C / 2: e4m3 latents c and c + C / 2 | R: bfloat16 rope dimensions]
    scales, float32  [one for each 128 latents]

The contents are those of FlashMLA's and vLLM's "fp8_ds_mla", the order is our own: a word's two latents go to
the same place in the two halves of a bfloat16 row, so that the kernel expands a page where it lies. Scales
are apart because a swizzled copy needs rows of a multiple of 128 bytes.

Rows of other attention are stored in the same way: its keys and values stand for latents, with a scale for
each head of them.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
WORD = jnp.uint16
_E4M3 = jnp.float8_e4m3fn
_E4M3_MAX = float(jnp.finfo(_E4M3).max)

PackedRows = tuple[jax.Array, jax.Array]


def pack(rows: jax.Array, rank: int, block: int = BLOCK) -> PackedRows:
    """Rows [..., C + R] as (words [..., C / 2 + R], scales [..., ceil(C / block)]); C = ``rank`` is even.

    A row that is not finite stays not finite: the scale of its block is NaN or infinite.
    """
    latent, rope = jnp.split(rows, [rank], axis=-1)
    latent = latent.astype(jnp.float32)
    blocks = jnp.pad(latent, [(0, 0)] * (rows.ndim - 1) + [(0, -rank % block)])
    peak = jnp.abs(blocks.reshape(*rows.shape[:-1], -1, block)).max(axis=-1)
    scales = jnp.maximum(peak, jnp.finfo(jnp.float32).tiny * _E4M3_MAX) / _E4M3_MAX
    values = (latent / _per_latent(scales, rank, block)).astype(_E4M3)
    low, high = jnp.split(lax.bitcast_convert_type(values, jnp.uint8).astype(WORD), 2, axis=-1)
    key = lax.bitcast_convert_type(rope.astype(jnp.bfloat16), WORD)
    return jnp.concatenate([low | high << 8, key], axis=-1), scales


def unpack(packed: PackedRows, rank: int, block: int = BLOCK) -> jax.Array:
    """The rows that `pack` packed, up to its rounding, float32 [..., C + R]."""
    words, scales = packed
    pairs, key = jnp.split(words, [rank // 2], axis=-1)
    values = jnp.concatenate([pairs & 0xFF, pairs >> 8], axis=-1).astype(jnp.uint8)
    latent = lax.bitcast_convert_type(values, _E4M3).astype(jnp.float32) * _per_latent(scales, rank, block)
    rope = lax.bitcast_convert_type(key, jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([latent, rope], axis=-1)


def _per_latent(scales: jax.Array, rank: int, block: int) -> jax.Array:
    return jnp.repeat(scales, block, axis=-1)[..., :rank]
