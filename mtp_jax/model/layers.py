"""The small parts every block uses: linear, RMSNorm, rotary embedding, SwiGLU, the vocabulary tables."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.hf_config import FP8_BLOCK
from mtp_jax.model.params import Fp8, Mlp

# On a CPU: above this many rows ``x @ w.T`` is the faster way in float32; bfloat16 takes so many at least.
_FEW_ROWS, _LEAST_ROWS = 64, 8


def expand(w: Float[Array, "*o i"] | Fp8, dtype: Any) -> Float[Array, "*o i"]:
    """A weight as an array: itself, or FP8 values times their scales, as loading it dequantised gives."""
    if not isinstance(w, Fp8):
        return w
    stacked = w.scale.shape[:-2]
    matrix = w.values.reshape(*stacked, -1, w.shape[-1])
    spread = jnp.repeat(jnp.repeat(w.scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
    spread = spread[..., : matrix.shape[-2], : matrix.shape[-1]]
    return (matrix.astype(jnp.float32) * spread).astype(dtype).reshape(w.shape)


def linear(x: Float[Array, "... i"], w: Float[Array, "*o i"] | Fp8) -> Float[Array, "..."]:
    """``x @ w.T`` with weights as in the checkpoint, output features first; FP8 ones are expanded per use."""
    return _product(x, expand(w, x.dtype), x.dtype)


def _product(x: Float[Array, "... i"], w: Float[Array, "*o i"], dtype: Any) -> Float[Array, "..."]:
    """``x @ w.T``, accumulated in float32.

    On a CPU, for few rows or in bfloat16, it is written ``w @ x.T`` behind a barrier: XLA would rewrite it
    into ``x @ w.T``, which is slower there. bfloat16 is only fast if the product leaves float32, which the
    barrier keeps XLA from narrowing, and with more than one row (docs/architecture.md).
    """
    rows, narrow = math.prod(x.shape[:-1]), x.dtype == jnp.bfloat16
    flat_x, flat_w = x.reshape(rows, x.shape[-1]), w.reshape(-1, w.shape[-1])
    contract_last = (((1,), (1,)), ((), ()))
    if platform() == "cpu" and (narrow or rows <= _FEW_ROWS):
        if narrow and rows < _LEAST_ROWS:
            flat_x = jnp.pad(flat_x, ((0, _LEAST_ROWS - rows), (0, 0)))
        y = jax.lax.dot_general(flat_w, flat_x, contract_last, preferred_element_type=jnp.float32)
        y = jax.lax.optimization_barrier(y)[:, :rows].T.astype(dtype)
    else:
        y = jax.lax.dot_general(flat_x, flat_w, contract_last, preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], *w.shape[:-1])


@jax.named_scope("norm")
def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """Root-mean-square normalisation in float32; the result has x's dtype (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight).astype(x.dtype)


def rope_frequencies(cfg: ModelConfig) -> Float[Array, " r"]:
    """Inverse frequencies, YaRN's blend included (arXiv 2309.00071, section 3.2), float32 [R/2]."""
    dims = cfg.qk_rope_head_dim
    i = jnp.arange(dims // 2, dtype=jnp.float32)
    inv = cfg.rope_theta ** (-2 * i / dims)
    yarn = cfg.rope_scaling
    if yarn is None:
        return inv

    def dim_of(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(cfg.rope_theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dims - 1)
    ramp = jnp.clip((i - low) / max(high - low, 0.001), 0, 1)
    return inv / yarn.factor * ramp + inv * (1 - ramp)


def rope_angles(cfg: ModelConfig, positions: Int[Array, "B W"]) -> Float[Array, "B W 2 r"]:
    """cos and sin of every position, stacked, float32."""
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(cfg)
    factor = cfg.rope_scaling.rope_factor if cfg.rope_scaling else 1.0
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-2) * factor


def rotate(
    x: Float[Array, "B W ... R"], angles: Float[Array, "#B W 2 r"], interleaved: bool
) -> Float[Array, "B W ... R"]:
    """Rotary embedding. Interleaved checkpoints pair (0,1), (2,3)...

    Interleaved input leaves as evens then odds: q and k alike, so their products do not change.
    """
    x32 = x.astype(jnp.float32)
    if interleaved:
        pairs = x32.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = jnp.split(x32, 2, axis=-1)
    cos, sin = angles[..., 0, :], angles[..., 1, :]
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def whole(x: Float[Array, "*s B W D"]) -> Float[Array, "B W D"]:
    """The sum of the parts that a product may leave (see ``products.linear``)."""
    return x.sum(axis=0).astype(jnp.bfloat16) if x.ndim == 4 else x


def swiglu(x: Float[Array, "... D"], p: Mlp) -> Float[Array, "... D"]:
    """down(silu(gate(x)) * up(x))."""
    gate_up = linear(x, p.gate_up)
    return linear(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], p.down)


@jax.named_scope("head")
def vocabulary_logits(hidden: Float[Array, "... D"], table: Float[Array, "V D"]) -> Float[Array, "... V"]:
    """Logits in float32, from rows in the table's dtype, products accumulated in float32."""
    return _product(hidden.astype(table.dtype), table, jnp.float32)
