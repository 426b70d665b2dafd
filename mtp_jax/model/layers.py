"""Small parts that every block uses: RMSNorm, rotary embedding, activation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.attention_config import Ropes
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import RopeScaling


@jax.named_scope("norm")
def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """Root-mean-square normalisation in float32; the result has x's dtype (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight).astype(x.dtype)


def _frequencies(dims: int, theta: float, scaling: RopeScaling | None) -> Float[Array, " r"]:
    """Inverse frequencies, float32 [R/2], scaled where a model's context was extended."""
    i = jnp.arange(dims // 2, dtype=jnp.float32)
    inv = theta ** (-2 * i / dims)
    if scaling is None:
        return inv
    share = scaling.shares(i, inv, theta)
    return inv / scaling.factor * share + inv * (1 - share)


def rope_angles(cfg: ModelConfig, positions: Int[Array, "B W"]) -> Float[Array, "B W ... 2 r"]:
    """cos and sin of every position, stacked, float32.

    A model whose layers are of two kinds (``AttentionConfig.ropes``) has angles of both, [B, W, 2, 2, r].
    """
    found = [angles_of(cfg, positions, kind) for kind in range(len(_ropes(cfg)))]
    return found[0] if len(found) == 1 else jnp.stack(found, axis=2)


def angles_of(cfg: ModelConfig, positions: Int[Array, "B W"], kind: int) -> Float[Array, "B W 2 r"]:
    """``rope_angles`` of one kind of layers."""
    theta, scaling = _ropes(cfg)[kind]
    angle = positions[..., None].astype(jnp.float32) * _frequencies(cfg.attention.rope_dim, theta, scaling)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-2) * (scaling.rope_factor if scaling else 1.0)


def _ropes(cfg: ModelConfig) -> Ropes:
    return cfg.attention.ropes(cfg.rope_theta, cfg.rope_scaling)


def rotate(
    x: Float[Array, "B W ... R"], angles: Float[Array, "#B W 2 r"], interleaved: bool
) -> Float[Array, "B W ... R"]:
    """Rotary embedding. Interleaved checkpoints pair (0,1), (2,3)...

    Interleaved input is returned as evens then odds: q and k alike, so their products do not change.
    """
    x32 = x.astype(jnp.float32)
    if interleaved:
        pairs = x32.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = jnp.split(x32, 2, axis=-1)
    if x.ndim == 4:
        angles = angles[:, :, None]
    # (cos, sin) and (-sin, cos): both halves at once, as a concatenation is a kernel of its own on a CPU.
    turned = angles[..., ::-1, :] * jnp.array([[-1.0], [1.0]])
    return (a[..., None, :] * angles + b[..., None, :] * turned).reshape(x.shape).astype(x.dtype)


def beside(a: Float[Array, "*b m"], b: Float[Array, "*b n"]) -> Float[Array, "*b mn"]:
    """[a | b]. XLA on a CPU makes a kernel of its own of a concatenation, not of sums."""
    ahead, behind = ([(0, 0)] * (a.ndim - 1) + [width] for width in ((0, b.shape[-1]), (a.shape[-1], 0)))
    return jnp.pad(a, ahead) + jnp.pad(b, behind)


def rotate_first(
    x: Float[Array, "B W ... h"], angles: Float[Array, "#B W 2 r"], interleaved: bool
) -> Float[Array, "B W ... h"]:
    """Rotate the first channels, two for each angle; the other channels stay unchanged."""
    rope, rest = jnp.split(x, [2 * angles.shape[-1]], axis=-1)
    return jnp.concatenate([rotate(rope, angles, interleaved), rest], axis=-1)


def rotate_last(x: Float[Array, "B W ... h"], angles: Float[Array, "#B W 2 r"]) -> Float[Array, "B W ... h"]:
    """Rotate the last channels, two neighbours for each angle. They are returned as evens, then odds."""
    rest, rope = jnp.split(x, [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    return jnp.concatenate([rest, rotate(rope, angles, interleaved=True)], axis=-1)


def unrotate_last(x: Float[Array, "B W N h"], angles: Float[Array, "#B W 2 r"]) -> Float[Array, "B W N h"]:
    """Undo ``rotate_last``, the order of channels included."""
    rest, rope = jnp.split(x, [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    back = rotate(rope, angles * jnp.array([[1.0], [-1.0]]), interleaved=False)
    pairs = jnp.stack(jnp.split(back, 2, axis=-1), axis=-1)
    return jnp.concatenate([rest, pairs.reshape(rope.shape)], axis=-1)


def gated(
    gate: Float[Array, "*b i"], up: Float[Array, "*b i"], limit: float | None = None
) -> Float[Array, "*b i"]:
    """``silu(gate) * up``, the activation of SwiGLU. limit: of gate, and of up in both directions."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def masked_softmax(
    scores: Float[Array, "B N W L"], mask: Bool[Array, "B W L"], scale: float
) -> Float[Array, "B N W L"]:
    """Softmax over the rows that each token sees, float32; zeros where it sees none."""
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    # An idle slot's peak of -inf would give NaN.
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(peak))  # the result does not depend on it
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
