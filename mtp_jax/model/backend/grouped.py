"""Grouped-query attention (arXiv 2305.13245), as GLM-4.5 to 4.7 have it: see ``attention``.

A row of the cache is [keys of every kv head | values of every kv head]; keys are normed and rotated before
they are cached. On a mesh every device holds whole rows, and attends with its own query heads.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.backend.products import Products
from mtp_jax.model.backend.xla_experts import Rows
from mtp_jax.model.cache import Entries, LayerCache, PagedView, read_rows
from mtp_jax.model.config import GroupedConfig, ModelConfig
from mtp_jax.model.layers import masked_softmax, rms_norm, rotate_first
from mtp_jax.model.params import Grouped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries, normed and rotated, [B, W, N, h]."""

    whole: Float[Array, "B W N h"]
    index: None = None


def queries(on: Products, a: Grouped, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Queries:
    """Projected, with bias and norm where the model has them, their first channels rotated."""
    return Queries(_turned(_plus(on.linear(x, a.q, split="out"), a.q_bias), a.q_norm, cfg, angles))


def entries(on: Products, a: Grouped, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Entries:
    """Keys, as queries are made, and values as they are projected."""
    keys = _turned(_plus(on.linear(x, a.k), a.k_bias), a.k_norm, cfg, angles)
    values = _plus(on.linear(x, a.v), a.v_bias)
    return Entries(jnp.concatenate([a.reshape(*a.shape[:2], -1) for a in (keys, values)], axis=-1))


def by_head(on: Products, a: Grouped, cfg: ModelConfig) -> tuple[Array, ...]:
    """The kv head of each query head."""
    heads = len(a.q)
    return (jnp.arange(heads) // (heads // _grouped(cfg).kv_heads),)


def over_rows(
    on: Products,
    cfg: ModelConfig,
    q: Queries,
    by_head: tuple[Array, ...],
    rows: Float[Array, "B L c"],
    mask: Bool[Array, "B W L"],
) -> Float[Array, "B W N v"]:
    """See ``attend``."""
    (kv_head,) = by_head
    group = cfg.num_attention_heads // _grouped(cfg).kv_heads
    return attend(q.whole, kv_head, rows, mask, _grouped(cfg), group, cfg.softmax_scale)


def over_pages(
    on: Products,
    cfg: ModelConfig,
    q: Queries,
    by_head: tuple[Array, ...],
    cache: LayerCache,
    view: PagedView,
    chosen: Int[Array, "B W K"] | None,
) -> Float[Array, "B W N v"]:
    """Attention over every row of the view's pages. Rows that no token sees are read as zeros."""
    assert chosen is None, "there is no indexer that could have chosen"
    width, entries = q.whole.shape[1], view.page_table.shape[1] * cache.page_size
    seen, row = view.visible.seen(entries), cfg.row
    rows = read_rows(cache, view.page_table, seen, q.whole.dtype, row.e4m3, row.block)
    return over_rows(on, cfg, q, by_head, rows, view.visible.mask(width, entries))


def attend(
    q: Float[Array, "B W N h"],
    kv_head: Int[Array, " N"],
    rows: Float[Array, "B L c"],
    mask: Bool[Array, "B W L"],
    g: GroupedConfig,
    group: int,
    scale: float,
) -> Float[Array, "B W N h"]:
    """Attention over rows [keys | values], softmax in float32. A token that sees nothing gets zeros.

    q: queries of all heads, or of one device's, which are whole groups or within one.
    kv_head: kv head of each query head; the first one's tells where a device's begin.
    group: query heads that share a kv head.
    """
    slots, width, heads, dim = q.shape
    keys, values = (a.reshape(*rows.shape[:2], g.kv_heads, dim) for a in jnp.split(rows, 2, axis=-1))
    count = max(heads // group, 1)
    if count < g.kv_heads:
        keys, values = (jax.lax.dynamic_slice_in_dim(a, kv_head[0], count, axis=2) for a in (keys, values))
    asked = q.reshape(slots, width, count, heads // count, dim)
    scores = jnp.einsum("bwgqh,blgh->bgqwl", asked, keys, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores.reshape(slots, heads, width, -1), mask, scale).astype(rows.dtype)
    by_group = weights.reshape(slots, count, heads // count, width, -1)
    return jnp.einsum("bgqwl,blgh->bwgqh", by_group, values).reshape(q.shape)


def _grouped(cfg: ModelConfig) -> GroupedConfig:
    assert cfg.grouped is not None, "a layer with grouped-query attention has a configuration of it"
    return cfg.grouped


def _plus(x: Float[Array, "B W N h"], bias: Float[Array, " Nh"] | None) -> Float[Array, "B W N h"]:
    return x if bias is None else x + bias.reshape(x.shape[2:])


def _turned(
    x: Float[Array, "B W N h"],
    norm: Float[Array, " h"] | None,
    cfg: ModelConfig,
    angles: Float[Array, "B W 2 r"],
) -> Float[Array, "B W N h"]:
    normed = x if norm is None else rms_norm(x, norm, cfg.rms_norm_eps)
    return rotate_first(normed, angles, interleaved=False)
