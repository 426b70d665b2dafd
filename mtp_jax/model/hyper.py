"""Manifold-constrained hyper-connections (arXiv 2512.24880): S residual streams in the place of one.

A sublayer reads a gated sum of the streams. Its result is added to each stream by another gate, and a doubly
stochastic matrix mixes the streams. Gates and matrix are made of all streams of a token. The mathematics is
in float32; streams have the dtype of the model.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Hyper, HyperHead

Exactly = Callable[[Array, Array], Array]
"""``Products.exactly``."""


@struct.dataclass
class Entered:
    """The streams while a sublayer runs.

    Attributes:
        streams: [B, W, S, D], before the sublayer.
        out: the gate of the sublayer's result into each stream, float32.
        mix: [..., j, k]: the share of stream j in the new stream k, float32.
    """

    streams: Float[Array, "B W S D"]
    out: Float[Array, "B W S"]
    mix: Float[Array, "B W S S"]


def several(x: object) -> TypeGuard[Array]:
    """Whether a stream between two blocks is several, side by side."""
    return isinstance(x, jax.Array) and x.ndim == 4


def begin(x: Float[Array, "B W D"], cfg: ModelConfig) -> Float[Array, "B W ..."]:
    """The streams before the first block: the embedding in each."""
    if cfg.hyper is None:
        return x
    return jnp.repeat(x[:, :, None], cfg.hyper.streams, axis=2)


@jax.named_scope("hyper")
def enter(
    x: Float[Array, "B W S D"], p: Hyper, cfg: ModelConfig, exactly: Exactly
) -> tuple[Entered, Float[Array, "B W D"]]:
    """The streams with their gates (section 4.2, eqs. 7-9 of the source), and the sublayer's input."""
    h, s = cfg.hyper, x.shape[2]
    assert h is not None, "parameters of hyper-connections have a configuration"
    found = exactly(_normed(x, cfg.rms_norm_eps), p.mix)
    into, out, mix = jnp.split(found, [s, 2 * s], axis=-1)
    base_in, base_out, base_mix = jnp.split(p.base, [s, 2 * s])
    into = jax.nn.sigmoid(into * p.scale[0] + base_in) + h.eps
    out = 2 * jax.nn.sigmoid(out * p.scale[1] + base_out)
    mix = jax.nn.softmax((mix * p.scale[2] + base_mix).reshape(*mix.shape[:-1], s, s), axis=-1) + h.eps
    return Entered(x, out, _balanced(mix, h.iterations, h.eps)), _gated(into, x)


def leave(x: Entered, result: Float[Array, "B W D"]) -> Float[Array, "B W S D"]:
    """The streams after a sublayer."""
    with jax.named_scope("hyper"):
        mixed = (x.mix[..., None] * x.streams[:, :, :, None].astype(jnp.float32)).sum(axis=2)
        added = x.out[..., None] * result[:, :, None].astype(jnp.float32)
        return (mixed + added).astype(x.streams.dtype)


@jax.named_scope("hyper")
def collapse(
    x: Float[Array, "*b S D"], p: HyperHead, cfg: ModelConfig, exactly: Exactly
) -> Float[Array, "*b D"]:
    """One stream behind the last block."""
    assert cfg.hyper is not None, "parameters of hyper-connections have a configuration"
    found = exactly(_normed(x, cfg.rms_norm_eps), p.mix)
    return _gated(jax.nn.sigmoid(found * p.scale + p.base) + cfg.hyper.eps, x)


def _normed(x: Float[Array, "*b S D"], eps: float) -> Float[Array, "*b SD"]:
    """All streams side by side, normed without a weight."""
    flat = x.reshape(*x.shape[:-2], -1).astype(jnp.float32)
    return flat * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)


def _gated(gates: Float[Array, "*b S"], x: Float[Array, "*b S D"]) -> Float[Array, "*b D"]:
    return (gates[..., None] * x.astype(jnp.float32)).sum(axis=-2).astype(x.dtype)


def _balanced(mix: Float[Array, "B W S S"], iterations: int, eps: float) -> Float[Array, "B W S S"]:
    """Columns and rows scaled in turn towards sums of one (Sinkhorn and Knopp), columns first and last."""
    mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)

    def one(_: Any, mix: Array) -> Array:
        mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
        return mix / (mix.sum(axis=-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, one, mix)
