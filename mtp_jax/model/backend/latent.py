"""Multi-head Latent Attention (arXiv 2405.04434, section 2.1), sparse or not: see ``attention``."""

from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model import indexer, mla
from mtp_jax.model.backend.products import Products
from mtp_jax.model.backend.xla_experts import Rows
from mtp_jax.model.cache import Entries, LayerCache, PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.mla import LOW_RANK_EPS, Queries
from mtp_jax.model.params import Attention


def queries(
    on: Products, a: Attention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]
) -> Queries:
    """Queries of every head (eqs. 12-14), and of the indexer where the layer has one."""
    low = x if a.q_a is None else rms_norm(on.linear(x, a.q_a), a.q_norm, LOW_RANK_EPS)
    q = mla.queries(on.linear(low, a.q_b, split="out"), cfg, angles)
    if a.indexer is None or cfg.indexer is None:
        return q
    with jax.named_scope("index"):
        weights = on.exactly(x, a.indexer.weights)
        return replace(q, index=indexer.queries(on.linear(low, a.indexer.q), weights, cfg.indexer, angles))


def entries(
    on: Products, a: Attention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]
) -> Entries:
    """The normed latent and the rotated shared key (eqs. 9, 11, 15), and the index key."""
    rows, p = mla.rows_of(on.linear(x, a.kv_a), a, cfg, angles), a.indexer
    if p is None or cfg.indexer is None:
        return Entries(rows)
    with jax.named_scope("index"):
        return Entries(rows, indexer.keys(on.linear(x, p.k), p.k_norm, p.k_bias, cfg.indexer, angles))


def by_head(on: Products, a: Attention, cfg: ModelConfig) -> tuple[Any, ...]:
    """The up-projections of every head, from the latent to keys and to values."""
    return on.by_head(a.k_up), on.by_head(a.v_up)


def over_rows(
    on: Products,
    cfg: ModelConfig,
    q: Queries,
    by_head: tuple[Any, ...],
    rows: Float[Array, "B L c"],
    mask: Bool[Array, "B W L"],
) -> Float[Array, "B W N v"]:
    """Attend to rows that were read from the cache, in the backend's form (naive or absorbed)."""
    k_up, v_up = by_head
    return on.attend_rows(q, k_up, v_up, rows, mask, cfg.softmax_scale, on.form)


def over_pages(
    on: Products,
    cfg: ModelConfig,
    q: Queries,
    by_head: tuple[Any, ...],
    cache: LayerCache,
    view: PagedView,
    chosen: Int[Array, "B W K"] | None,
) -> Float[Array, "B W N v"]:
    """Attend to the pages of the cache, in the view's form (naive or absorbed)."""
    k_up, v_up = by_head
    return on.attend_chosen(q, k_up, v_up, cache, view, cfg.softmax_scale, chosen)
