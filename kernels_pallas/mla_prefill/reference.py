"""The operation in jnp: all scores at once."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.visible import Window

EXACT = lax.Precision.HIGHEST


def attend(
    q: jax.Array, k: jax.Array, k_rope: jax.Array, v: jax.Array, visible: Window, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`kernels_pallas.mla_prefill.api.attend` in float32; queries past the count see nothing."""
    nope, rope = jnp.split(q.astype(jnp.float32), [k.shape[-1]], axis=-1)
    scores = jnp.einsum("btnh,blnh->bntl", nope, k.astype(jnp.float32), precision=EXACT)
    scores += jnp.einsum("btnr,blr->bntl", rope, k_rope.astype(jnp.float32), precision=EXACT)
    mask = visible.mask(q.shape[1], k.shape[1])
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    # A query that sees nothing must give zeros, not NaN.
    peak = jnp.maximum(scores.max(axis=-1), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - peak[..., None])
    total = weights.sum(axis=-1)
    out = jnp.einsum("bntl,blnv->bntv", weights, v.astype(jnp.float32), precision=EXACT)
    out /= jnp.maximum(total, 1e-30)[..., None]
    lse = jnp.where(total > 0, (peak + jnp.log(jnp.maximum(total, 1e-30))) / jnp.log(2.0), -1e30)
    return out.transpose(0, 2, 1, 3), lse
