"""Baselines that compute attention over expanded keys and values on a GPU."""

import jax
import jax.numpy as jnp

from kernels_pallas.check.case import UnavailableError
from kernels_pallas.visible import Window


def xla(
    q: jax.Array, k: jax.Array, k_rope: jax.Array, v: jax.Array, visible: Window, *, scale: float
) -> jax.Array:
    """XLA's own lowering in bfloat16: two matrix products around a softmax in float32."""
    nope, rope = jnp.split(q, [k.shape[-1]], axis=-1)
    scores = jnp.einsum("btnh,blnh->bntl", nope, k, preferred_element_type=jnp.float32)
    scores += jnp.einsum("btnr,blr->bntl", rope, k_rope, preferred_element_type=jnp.float32)
    mask = visible.mask(q.shape[1], k.shape[1])[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores * scale, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bntl,blnv->btnv", weights, v)


def cudnn(
    q: jax.Array, k: jax.Array, k_rope: jax.Array, v: jax.Array, visible: Window, *, scale: float
) -> jax.Array:
    """cuDNN through JAX's public function, which needs values as wide as keys: they are padded."""
    if q.shape[1] != k.shape[1]:
        raise UnavailableError("its causal mask has queries and keys begin together")
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:-1], k_rope.shape[-1]))
    keys = jnp.concatenate([k, shared], axis=-1)
    values = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, keys.shape[-1] - v.shape[-1])))
    try:
        out = jax.nn.dot_product_attention(
            q, keys, values, scale=scale, is_causal=True, key_value_seq_lengths=visible.end(),
            query_seq_lengths=visible.count, implementation="cudnn",
        )  # fmt: skip
    except (RuntimeError, ValueError, NotImplementedError) as e:
        raise UnavailableError(str(e)) from e
    return out[..., : v.shape[-1]]
