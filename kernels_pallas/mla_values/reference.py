"""The operation in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.quantised import Quantised, quantise, whole_tiles


def mla_values(
    out: Float[Array, "s B M C"], lse: Float[Array, "s B k l"], v_up: Float[Array, "N v C"], *, window: int
) -> Quantised:
    """`api.mla_values` for any sizes; rounded to bfloat16 where launches of their own would round."""
    _, slots, height, rank = out.shape
    heads, width, _ = v_up.shape
    sizes = lse[..., : height // lse.shape[2]].reshape(*out.shape[:3], 1)
    weights = jnp.exp2(sizes - sizes.max(axis=0))
    mixed = (out.astype(jnp.float32) * weights).sum(axis=0) / weights.sum(axis=0)
    mixed = _rounded(mixed).reshape(slots, window, -1, rank)[:, :, :heads]
    values = jnp.einsum("bwnc,nvc->bwnv", mixed, v_up.astype(jnp.float32), precision="highest")
    rows = _rounded(values).reshape(slots * window, heads * width)
    return quantise(rows).padded(whole_tiles(slots * window))


def _rounded(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
