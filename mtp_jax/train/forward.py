"""The training forward pass: whole sequences, no cache, every expert computed densely, router loads reported.

It computes what `model.trunk` and `model.nextn` compute, laid out for long batches and for differentiation.
The recursion of a single NextN layer is trained as it runs at inference ("training-time test", arXiv
2503.01840): a row of depth k attends to the rows of depth 1 up to its own and to its own chain, not to other
rows of depth k.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import linear, rms_norm, rope_angles, rotate, swiglu
from mtp_jax.model.moe import route
from mtp_jax.model.params import Attention, Layer, Moe, Params

_MASKED = -1e30


class Loaded(NamedTuple):
    """Activations and what their MoE blocks routed: rows per expert, float32 [E], one per MoE block."""

    x: Float[Array, "B T D"]
    loads: tuple[Any, ...]


class Rows(NamedTuple):
    """Queries, keys [B, N, T, qk] and values [B, N, T, v] of one attention block."""

    q: Any
    k: Any
    v: Any


def trunk(params: Params, cfg: ModelConfig, tokens: Int[Array, "B T"]) -> Loaded:
    """Hidden states after the final norm [B, T, D], and the loads of the MoE layers in order."""
    angles = _angles(cfg, tokens.shape[1], 0)
    x = params.embed[tokens]
    loads: list[jax.Array] = []
    for layer in params.layers:
        rows = _rows(layer.attention, cfg, rms_norm(x, layer.attention_norm, cfg.rms_norm_eps), angles)
        out = _block_end(layer, cfg, x, _attend(cfg, rows.q, [rows], []))
        x = out.x
        loads += out.loads
    return Loaded(rms_norm(x, params.norm, cfg.rms_norm_eps), tuple(loads))


def nextn(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B n"], hidden: Float[Array, "B T D"], depth: int
) -> tuple[Loaded, ...]:
    """NextN states z_1..z_depth [B, T, D] after the norm, with the text's own tokens as drafts.

    Args:
        params: the model; its NextN layer (k - 1) modulo the number of NextN layers serves depth k.
        cfg: its configuration.
        tokens: ids; row i of depth k takes tokens[:, i + k], so n >= T + depth.
        hidden: the trunk's states of tokens[:, :T], after the final norm.
        depth: how many tokens ahead of the trunk.
    """
    length = hidden.shape[1]
    outputs: list[Loaded] = []
    chain: list[Rows] = []
    z = hidden
    for k in range(1, depth + 1):
        p = params.nextn[(k - 1) % len(params.nextn)]
        table = params.embed if p.embed is None else p.embed
        e = rms_norm(table[tokens[:, k : k + length]], p.token_norm, cfg.rms_norm_eps)
        h = rms_norm(z, p.hidden_norm, cfg.rms_norm_eps)
        x = linear(jnp.concatenate([e, h], axis=-1), p.merge)
        normed = rms_norm(x, p.layer.attention_norm, cfg.rms_norm_eps)
        rows = _rows(p.layer.attention, cfg, normed, _angles(cfg, length, k - 1))
        chain.append(rows)
        if len(params.nextn) == 1:
            out = _block_end(p.layer, cfg, x, _attend(cfg, rows.q, chain[:1], chain[1:]))
        else:  # distinct layers follow the report: each has its own rows at every position
            out = _block_end(p.layer, cfg, x, _attend(cfg, rows.q, [rows], []))
        z = rms_norm(out.x, p.norm, cfg.rms_norm_eps)
        outputs.append(Loaded(z, out.loads))
    return tuple(outputs)


def _angles(cfg: ModelConfig, length: int, start: int) -> jax.Array:
    return rope_angles(cfg, jnp.arange(start, start + length)[None])


def _rows(p: Attention, cfg: ModelConfig, x: Float[Array, "B T D"], angles: jax.Array) -> Rows:
    nope, latent = cfg.qk_nope_head_dim, cfg.kv_lora_rank
    low = x if p.q_a is None else rms_norm(linear(x, p.q_a), p.q_norm, cfg.rms_norm_eps)
    q = linear(low, p.q_b)
    q = jnp.concatenate([q[..., :nope], rotate(q[..., nope:], angles, cfg.rope_interleave)], axis=-1)
    kv = linear(x, p.kv_a)
    c = rms_norm(kv[..., :latent], p.kv_norm, cfg.rms_norm_eps)
    k_nope = linear(c, p.k_up)
    k_pe = rotate(kv[..., latent:], angles, cfg.rope_interleave)[:, :, None]
    k_pe = jnp.broadcast_to(k_pe, (*k_nope.shape[:3], k_pe.shape[-1]))
    k = jnp.concatenate([k_nope, k_pe], axis=-1)
    return Rows(*(a.swapaxes(1, 2) for a in (q * cfg.softmax_scale, k, linear(c, p.v_up))))


def _attend(cfg: ModelConfig, q: jax.Array, causal: list[Rows], own: list[Rows]) -> Float[Array, "B T N v"]:
    """Attention of q over causal[0]'s rows up to its own, and over the same row of each of `own`."""
    past = causal[0]
    length = q.shape[2]
    scores = jnp.where(jnp.tri(length, dtype=bool), q @ past.k.swapaxes(-1, -2), _MASKED)
    if own:
        scores = jnp.concatenate([scores, *(jnp.sum(q * r.k, -1, keepdims=True) for r in own)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    out = weights[..., :length] @ past.v
    for i, r in enumerate(own):
        out = out + weights[..., length + i, None] * r.v
    return out.swapaxes(1, 2)


def _block_end(layer: Layer, cfg: ModelConfig, x: jax.Array, attended: jax.Array) -> Loaded:
    flat = attended.reshape(*attended.shape[:2], -1)
    x = x + linear(flat, layer.attention.o.reshape(cfg.hidden_size, -1))
    h = rms_norm(x, layer.mlp_norm, cfg.rms_norm_eps)
    if not isinstance(layer.mlp, Moe):
        return Loaded(x + swiglu(h, layer.mlp), ())
    out = _moe(layer.mlp, cfg, h)
    return Loaded(x + out.x, out.loads)


def _moe(p: Moe, cfg: ModelConfig, x: Float[Array, "B T D"]) -> Loaded:
    """All experts as one wide MLP whose hidden units are scaled by the routing weights."""
    routing = route(p, cfg, x)
    chosen = jax.nn.one_hot(routing.ids, p.bias.shape[0])  # [B, T, k, E]
    weights = jnp.einsum("btke,btk->bte", chosen, routing.weights)
    experts, _, width, hidden = p.gate_up.shape
    gate_up = linear(x, p.gate_up)  # [B, T, E, 2, I]
    h = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :] * weights[..., None]
    down = p.down.swapaxes(0, 1).reshape(hidden, experts * width)
    y = linear(h.reshape(*x.shape[:2], -1), down)
    if p.shared is not None:
        y = y + swiglu(x, p.shared)
    return Loaded(y, (chosen.sum((0, 1, 2)),))
