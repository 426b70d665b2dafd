"""The operation in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def mla_absorb(
    q: Float[Array, "s T N k"],
    k_up: Float[Array, "N h C"],
    angles: tuple[Float[Array, "T r"], Float[Array, "T r"]],
    *,
    interleaved: bool,
) -> tuple[Float[Array, "T N C"], Float[Array, "T N R"]]:
    """`api.mla_absorb` for any sizes, in float32 but for the sum of parts."""
    whole = q.astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16).astype(jnp.float32)
    nope, rope = jnp.split(whole, [k_up.shape[1]], axis=-1)
    inward = jnp.einsum("tnh,nhc->tnc", nope, k_up.astype(jnp.float32), precision="highest")
    a, b = (rope[..., ::2], rope[..., 1::2]) if interleaved else jnp.split(rope, 2, axis=-1)
    cos, sin = (x[:, None] for x in angles)
    return inward, jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
