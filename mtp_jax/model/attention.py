"""Multi-head Latent Attention: projections around the attention op."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mtp_jax.config import ModelConfig
from mtp_jax.model.layers import rms_norm, rotate
from mtp_jax.model.ops import AUTO, Form, Kernels, PagedView, Pages, Queries, attend, linear, paged_attention
from mtp_jax.model.params import Attention
from mtp_jax.model.sharding import constrain

# Of the two norms on low-rank projections, whatever rms_norm_eps says: the reference implementation fixes it.
_LOW_RANK_EPS = 1e-6


def project(
    p: Attention,
    cfg: ModelConfig,
    x: Float[Array, "B W D"],
    angles: Float[Array, "B W 2 r"],
    *,
    mesh: Mesh | None = None,
    kernels: Kernels = AUTO,
) -> tuple[Queries, Float[Array, "B W C"]]:
    """Queries, and the rows to cache (arXiv 2405.04434, eqs. 9-15)."""
    on: dict[str, Any] = {"kernels": kernels, "mesh": mesh}
    low = x if p.q_a is None else rms_norm(linear(x, p.q_a, **on), p.q_norm, _LOW_RANK_EPS)
    q = linear(low, p.q_b, split="out", **on)
    q_nope, q_rope = jnp.split(q, [cfg.qk_nope_head_dim], axis=-1)
    queries = Queries(q_nope, rotate(q_rope, angles, cfg.rope_interleave))
    return queries, latent_rows(p, cfg, x, angles, **on)


def latent_rows(
    p: Attention,
    cfg: ModelConfig,
    x: Float[Array, "B W D"],
    angles: Float[Array, "B W 2 r"],
    *,
    mesh: Mesh | None = None,
    kernels: Kernels = AUTO,
) -> Float[Array, "B W C"]:
    """The rows to cache: the normed latent and the rotated shared key (eqs. 9, 11, 15)."""
    latent, key_rope = jnp.split(linear(x, p.kv_a, kernels=kernels, mesh=mesh), [cfg.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, p.kv_norm, _LOW_RANK_EPS)
    return jnp.concatenate([latent, rotate(key_rope, angles, cfg.rope_interleave)], axis=-1)


def attention(
    p: Attention,
    cfg: ModelConfig,
    x: Float[Array, "B W D"],
    angles: Float[Array, "B W 2 r"],
    pages: Pages | None,
    view: PagedView | None,
    *,
    form: Form,
    mesh: Mesh | None,
    kernels: Kernels = AUTO,
) -> tuple[Float[Array, "B W D"], Pages | None]:
    """One MLA block. Without ``pages`` the window attends causally to itself. Returns (output, pages)."""
    with jax.named_scope("attention_project"):
        q, rows = project(p, cfg, x, angles, mesh=mesh, kernels=kernels)
    if pages is None or view is None:
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        mask = jnp.broadcast_to(causal, (x.shape[0], *causal.shape))
        context = attend(q, p.k_up, p.v_up, rows, mask, cfg.softmax_scale, form)
    else:
        context, pages = paged_attention(
            q,
            p.k_up,
            p.v_up,
            rows,
            pages,
            view,
            scale=cfg.softmax_scale,
            form=form,
            mesh=mesh,
            kernels=kernels,
        )
    with jax.named_scope("attention_out"):
        flat = context.reshape(*x.shape[:-1], -1)
        o = p.o.reshape(cfg.hidden_size, -1)
        out = linear(flat, o, kernels=kernels, mesh=mesh, split="in")
    return constrain(out, mesh, "slots", None, None), pages
