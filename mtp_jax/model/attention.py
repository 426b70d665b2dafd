"""Multi-head Latent Attention: projections around the attention op."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mtp_jax.model import products
from mtp_jax.model.cache import LayerCache, PagedView, WholeCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.kernels import AUTO, Kernels
from mtp_jax.model.layers import rms_norm, rotate, whole
from mtp_jax.model.ops import (
    Form,
    Queries,
    attend,
    low_rank,
    norms_low_rank,
    paged_attention,
)
from mtp_jax.model.params import Attention
from mtp_jax.model.products import linear
from mtp_jax.model.sharding import constrain

# Of the two norms on low-rank projections, whatever rms_norm_eps says: the reference implementation fixes it.
_LOW_RANK_EPS = 1e-6


def project(
    p: Attention,
    cfg: ModelConfig,
    x: products.Input,
    angles: Float[Array, "B W 2 r"],
    cache: LayerCache | None,
    view: PagedView | None,
    *,
    mesh: Mesh | None = None,
    kernels: Kernels = AUTO,
) -> tuple[Queries, Float[Array, "B W C"] | None, LayerCache | None]:
    """Queries, and the rows to cache (arXiv 2405.04434, eqs. 9-15); None if the cache has them already."""
    on: dict[str, Any] = {"kernels": kernels, "mesh": mesh}
    q = None if p.q_a is None else linear(x, p.q_a, summed=False, **on)
    kv = linear(x, p.kv_a, summed=False, **on)
    reader = products.takes_quantised(p.q_b, products.dtype_of(x), split="out", **on)
    if (
        not (q is None or cache is None or view is None)
        and reader
        and norms_low_rank(kernels, q, kv, p.kv_norm, cache)
    ):
        norms: dict[str, Any] = {"eps": _LOW_RANK_EPS, "interleaved": cfg.rope_interleave, "mesh": mesh}
        low, rows, cache = low_rank(q, kv, p.q_norm, p.kv_norm, angles, cache, view, **norms)
    else:
        low = x if q is None else products.norm(q, p.q_norm, _LOW_RANK_EPS, (reader,), mesh=mesh)[1]
        rows = _rows(p, cfg, kv, angles)
    q = linear(low, p.q_b, split="out", **on)
    q_nope, q_rope = jnp.split(q, [cfg.qk_nope_head_dim], axis=-1)
    return Queries(q_nope, rotate(q_rope, angles, cfg.rope_interleave)), rows, cache


def latent_rows(
    p: Attention,
    cfg: ModelConfig,
    x: products.Input,
    angles: Float[Array, "B W 2 r"],
    *,
    mesh: Mesh | None = None,
    kernels: Kernels = AUTO,
) -> Float[Array, "B W C"]:
    """The rows to cache of a block that does not attend."""
    return _rows(p, cfg, linear(x, p.kv_a, kernels=kernels, mesh=mesh), angles)


def _rows(
    p: Attention, cfg: ModelConfig, kv: Float[Array, "*s B W C"], angles: Float[Array, "B W 2 r"]
) -> Float[Array, "B W C"]:
    """The normed latent and the rotated shared key (eqs. 9, 11, 15)."""
    latent, key_rope = jnp.split(whole(kv), [cfg.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, p.kv_norm, _LOW_RANK_EPS)
    return jnp.concatenate([latent, rotate(key_rope, angles, cfg.rope_interleave)], axis=-1)


def takes_quantised(p: Attention, dtype: Any, *, mesh: Mesh | None, kernels: Kernels) -> tuple[bool, bool]:
    """For each product that reads a block's input, whether it takes it quantised."""
    on: dict[str, Any] = {"kernels": kernels, "mesh": mesh}
    if p.q_a is None:
        of_queries = products.takes_quantised(p.q_b, dtype, split="out", **on)
    else:
        of_queries = products.takes_quantised(p.q_a, dtype, **on)
    return of_queries, products.takes_quantised(p.kv_a, dtype, **on)


def attention(
    p: Attention,
    cfg: ModelConfig,
    x: products.Input,
    angles: Float[Array, "B W 2 r"],
    cache: LayerCache | WholeCache | None,
    view: PagedView | None,
    *,
    form: Form,
    mesh: Mesh | None,
    kernels: Kernels = AUTO,
) -> tuple[Float[Array, "B W D"] | Float[Array, "s B W D"], LayerCache | WholeCache | None]:
    """One MLA block. Without a cache the window attends causally to itself; pages need a view.

    Returns (output, perhaps in parts to be summed, cache).
    """
    pages = cache if isinstance(cache, LayerCache) else None
    with jax.named_scope("attention_project"):
        q, rows, pages = project(p, cfg, x, angles, pages, view, mesh=mesh, kernels=kernels)
    if pages is None or view is None:
        assert rows is not None, "rows have nowhere to be but here"
        mask = jnp.tri(x.shape[1], dtype=bool)
        if isinstance(cache, WholeCache):
            cache = cache.extended(rows)
            rows, mask = cache.rows, cache.mask
        mask = jnp.broadcast_to(mask, (x.shape[0], *mask.shape))
        context = attend(q, p.k_up, p.v_up, rows, mask, cfg.softmax_scale, form)
    else:
        context, cache = paged_attention(
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
        o = p.o.reshape(cfg.hidden_size, -1)
        reader = products.takes_quantised(o, context.dtype, kernels=kernels, mesh=mesh, split="in")
        flat = products.heads_as_rows(context, reader, heads_first=form == "absorbed", mesh=mesh)
        out = linear(flat, o, kernels=kernels, mesh=mesh, split="in", summed=False)
    return constrain(out, mesh, *(None,) * (out.ndim - 3), "slots", None, None), cache
