"""The operations in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.quantised import quantise as quantise_rows


def rms_norm(
    x: Float[Array, "T k 128"],
    residual: Float[Array, "T k 128"] | None,
    weight: Float[Array, "k 128"],
    *,
    eps: float,
    plain: bool,
    quantised: bool,
) -> tuple[Array, ...]:
    """As `mosaic_gpu.rms_norm`; float32 beside the sum, which is rounded before it is normalised."""
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=(1, 2), keepdims=True)
    normed = wide * jax.lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
    out = () if residual is None else (total,)
    if plain:
        out += (normed,)
    return (*out, *_quantised(normed)) if quantised else out


def quantise(x: Float[Array, "k T 128"]) -> tuple[Array, ...]:
    """As `mosaic_gpu.quantise`."""
    return _quantised(x.swapaxes(0, 1))


def _quantised(x: Float[Array, "T k 128"]) -> tuple[Array, ...]:
    rows = quantise_rows(x.reshape(x.shape[0], -1))
    return rows.values.reshape(x.shape), rows.scale
