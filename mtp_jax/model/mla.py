"""Multi-head Latent Attention over rows at hand, in its two forms, by XLA."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mtp_jax.config import ModelConfig
from mtp_jax.model.device import platform

Form = Literal["naive", "absorbed"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries after projection: the part matched with the up-projected latent, and the rope part."""

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]


def prefill_form(cfg: ModelConfig, window: int) -> Form:
    """The form that takes fewer operations for ``window`` tokens over long histories.

    naive: every cached row is expanded once, (h + v) * C for each head; absorbed: each token pays 2 C - h - v
    more per row. A GPU always takes the naive form, which its kernel is for.
    """
    expanded, rank = cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank
    few = window * (2 * rank - expanded) <= expanded * rank
    return "absorbed" if few and platform() == "cpu" else "naive"


def attend(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    rows: Float[Array, "B L c"],
    mask: Bool[Array, "B W L"],
    scale: float,
    form: Form,
) -> Float[Array, "B W N v"]:
    """MLA over cached rows ``[latent | rope key]`` (arXiv 2405.04434, eqs. 9-19); softmax in float32.

    ``naive`` expands the latent to keys and values of every head; ``absorbed`` moves the expansion to the
    query and the output, so that all heads read the latent itself. Equal up to rounding.
    """
    rank = k_up.shape[-1]
    if form == "naive":
        latent, key_rope = jnp.split(rows, [rank], axis=-1)
        keys = _expand(latent, k_up)
        shared = jnp.broadcast_to(key_rope.swapaxes(1, 2)[:, None], (*keys.shape[:2], *key_rope.shape[:0:-1]))
        whole = jnp.concatenate([q.nope, q.rope], axis=-1).transpose(0, 2, 1, 3)
        scores = _by_head(_fixed(whole), jnp.concatenate([keys, shared], axis=2), (3, 2))
    else:
        whole = jnp.concatenate([absorb(q.nope, k_up), q.rope], axis=-1)
        scores = jnp.einsum("bwnc,blc->bnwl", whole, rows, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    # A row that sees nothing (an idle slot) must give zeros, not NaN.
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - peak)
    weights = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).astype(rows.dtype)
    if form == "naive":
        context = _by_head(_expand(latent, v_up), _fixed(weights), (3, 3))
        return context.transpose(0, 3, 1, 2).astype(rows.dtype)
    # Whole rows again: slicing the rope part off the result is cheaper than off the cache.
    return jnp.einsum("bwnc,nvc->bwnv", _mix(weights, rows)[..., :rank], v_up)


def _fixed(x: jax.Array) -> jax.Array:
    """Keeps XLA on a CPU from swapping a product's operands, or turning them: up to four times slower."""
    return jax.lax.optimization_barrier(x) if platform() == "cpu" else x


def _expand(latent: Float[Array, "B L C"], up: Float[Array, "N o C"]) -> Float[Array, "B N o L"]:
    """Keys or values of every head, a column for each cached row."""
    (slots, length, rank), heads = latent.shape, len(up)
    dims = (((1,), (1,)), ((), ()))
    columns = jax.lax.dot_general(up.reshape(-1, rank), latent.reshape(-1, rank), dims)
    return _fixed(columns).reshape(heads, -1, slots, length).transpose(2, 0, 1, 3)


def _by_head(
    a: Float[Array, "B N x y"], b: Float[Array, "B N z t"], contracted: tuple[int, int]
) -> Float[Array, "B N s u"]:
    """Products of every slot and head, in float32."""
    dims = ((contracted[:1], contracted[1:]), ((0, 1), (0, 1)))
    return _fixed(jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32))


def _mix(weights: Float[Array, "B N W L"], rows: Float[Array, "B L c"]) -> Float[Array, "B W N c"]:
    """Cached rows summed by weight."""
    slots, heads, width, length = weights.shape
    flat = _fixed(weights.reshape(slots, heads * width, length))
    mixed = _fixed(jax.lax.dot_general(flat, rows, (((2,), (1,)), ((0,), (0,)))))
    return mixed.reshape(slots, heads, width, -1).transpose(0, 2, 1, 3)


def absorb(q: Float[Array, "B W N h"], k_up: Float[Array, "N h C"]) -> Float[Array, "B W N C"]:
    """Queries moved into the latent space."""
    if platform() != "cpu":
        return jnp.einsum("bwnh,nhc->bwnc", q, k_up)
    slots, width, heads, _ = q.shape
    by_head = _fixed(q.transpose(2, 0, 1, 3).reshape(heads, slots * width, -1))
    latent = _fixed(jax.lax.dot_general(by_head, k_up, (((2,), (1,)), ((0,), (0,)))))
    return latent.reshape(heads, slots, width, -1).transpose(1, 2, 0, 3)
