"""Multi-head Latent Attention (arXiv 2405.04434, section 2.1), sparse (arXiv 2512.02556) or not."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model import indexer, mla
from mtp_jax.model.attention.kind import OverRows
from mtp_jax.model.attention.source import Chosen, Paged, Source, Whole
from mtp_jax.model.cache import Entries
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.layers import masked_softmax, rms_norm
from mtp_jax.model.mla import LOW_RANK_EPS, Queries, Ups
from mtp_jax.model.narrow import expand
from mtp_jax.model.params import Attention
from mtp_jax.model.products.plain import Rows


@dataclass(frozen=True)
class Latent(OverRows):
    """MLA in its two forms (``mla``), with an indexer's choice of rows where a layer has one."""

    def queries(self, a: Attention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Queries:
        """Queries of every head (eqs. 12-14), and of the indexer where the layer has one."""
        on = self.on
        low = x if a.q_a is None else rms_norm(on.linear(x, a.q_a), a.q_norm, LOW_RANK_EPS)
        q = mla.queries(on.linear(low, a.q_b, split="out"), cfg, angles)
        if a.indexer is None:
            return q
        with jax.named_scope("index"):
            weights = on.exactly(x, a.indexer.weights)
            index = indexer.queries(on.linear(low, a.indexer.q), weights, _of(cfg), angles)
            return replace(q, index=index)

    def entries(self, a: Attention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Entries:
        """The normed latent and the rotated shared key (eqs. 9, 11, 15), and the index key."""
        rows, p = mla.rows_of(self.on.linear(x, a.kv_a), a, cfg, angles), a.indexer
        if p is None:
            return Entries(rows)
        with jax.named_scope("index"):
            keys = indexer.keys(self.on.linear(x, p.k), p.k_norm, p.k_bias, _of(cfg), angles)
            return Entries(rows, keys)

    def by_head(self, a: Attention, cfg: ModelConfig) -> Ups:
        """Turns the up-projections into arrays."""
        return Ups(expand(a.k_up, jnp.float32), expand(a.v_up, jnp.float32))

    def attend(self, q: Queries, w: Ups, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """MLA over rows ``[latent | rope key]`` (arXiv 2405.04434, eqs. 9-19); softmax in float32.

        ``naive`` expands the latent to keys and values of every head; ``absorbed`` moves the expansion to the
        query and the output, so that all heads read the latent itself. Equal up to rounding.
        """
        if isinstance(source, Chosen):
            own = source.read(q.nope.dtype)
            return source.together(self.attend(source.apart(q), w, own, scale))
        rows, mask = source.read(q.nope.dtype)
        latent, key_rope = jnp.split(rows, [w.k.shape[-1]], axis=-1)
        wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = wide("bwnr,blr->bnwl", q.rope, key_rope)
        if source.form == "absorbed":
            inward = jnp.einsum("bwnh,nhc->bwnc", q.nope, w.k)
            weights = masked_softmax(scores + wide("bwnc,blc->bnwl", inward, latent), mask, scale)
            mixed = jnp.einsum("bnwl,blc->bwnc", weights.astype(rows.dtype), latent)
            return jnp.einsum("bwnc,nvc->bwnv", mixed, w.v)
        keys = jnp.einsum("blc,nhc->blnh", latent, w.k)
        values = jnp.einsum("blc,nvc->blnv", latent, w.v)
        weights = masked_softmax(scores + wide("bwnh,blnh->bnwl", q.nope, keys), mask, scale)
        return jnp.einsum("bnwl,blnv->bwnv", weights.astype(rows.dtype), values)

    def choose(self, q: IndexQueries, source: Whole | Paged, cfg: ModelConfig) -> Int[Array, "B W K"] | None:
        """The topk rows with the best scores, in order of rows; NOTHING first where a token sees fewer.

        None: all rows that a token sees, where these cannot be more than topk.
        """
        topk = _of(cfg).topk
        if source.length <= topk:
            return None
        with jax.named_scope("index"):
            return self.best(self.scores(q, source), topk)

    def scores(self, q: IndexQueries, source: Whole | Paged) -> Float[Array, "B W L"]:
        """The indexer's scores of a source's rows; none is NaN."""
        return source.scores(q)

    def best(self, found: Float[Array, "B W L"], count: int) -> Int[Array, "B W K"]:
        """The rows with the best of these scores."""
        return indexer.best(found, count)


def _of(cfg: ModelConfig) -> IndexerConfig:
    assert cfg.indexer is not None, "a layer with an indexer has a configuration of it"
    return cfg.indexer
