"""The operations in plain jnp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.quantised import quantise as quantise_rows


def rms_norm(
    addends: Sequence[Float[Array, "_ T k 128"]],
    weight: Float[Array, "k 128"],
    *,
    eps: float,
    total: bool,
    plain: bool,
    quantised: bool,
) -> tuple[Array, ...]:
    """`mosaic_gpu.rms_norm` in float32, except the sum, which is rounded before it is normalised."""
    x = sum(
        (a.astype(jnp.float32).sum(axis=0) for a in addends[1:]), addends[0].astype(jnp.float32).sum(axis=0)
    )
    x = x.astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=(1, 2), keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
    out = (x,) if total else ()
    if plain:
        out += (normed,)
    return (*out, *_quantised(normed)) if quantised else out


def quantise(
    x: Float[Array, "k T 128"] | Float[Array, "T k 128"], *, blocks_first: bool
) -> tuple[Array, ...]:
    """`mosaic_gpu.quantise` in plain jnp."""
    return _quantised(x.swapaxes(0, 1) if blocks_first else x)


def _quantised(x: Float[Array, "T k 128"]) -> tuple[Array, ...]:
    rows = quantise_rows(x.reshape(x.shape[0], -1))
    return rows.values.reshape(x.shape), rows.scale
