"""Baselines that multiply with block-scaled FP8 weights on a GPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.grouped_matmul.reference import expand_weights
from kernels_pallas.quantised import Quantised


def xla(
    x: Float[Array, "M K"],
    w: Float[Array, "b N K"],
    x_scale: Float[Array, "k M"],
    w_scale: Float[Array, "b n k"],
) -> Array:
    """XLA's own lowering: the weight expanded to bfloat16, then a bfloat16 product."""
    left = Quantised(x, x_scale).expand().astype(jnp.bfloat16)
    y = jnp.einsum("mk,bnk->bmn", left, expand_weights(w, w_scale, jnp.bfloat16))
    return y[0] if w.shape[0] == 1 else jax.nn.silu(y[0]) * y[1]
