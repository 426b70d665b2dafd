"""Multi-head Latent Attention: queries and rows from results of projections, attention in its two forms."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.layers import masked_softmax, rms_norm, rotate
from mtp_jax.model.params import Attention

Form = Literal["naive", "absorbed"]


@struct.dataclass
class Queries:
    """Queries after projection.

    Attributes:
        nope: the part matched with the up-projected latent.
        rope: the part matched with the shared rope key.
        inward: ``nope`` in the latent space, where a kernel has absorbed the keys' up-projection already.
        index: the indexer's queries, which meet index keys; None in a layer without an indexer.
    """

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]
    inward: Float[Array, "B W N C"] | None = None
    index: IndexQueries | None = None


class Ups(NamedTuple):
    """The up-projections of every head: from the latent to keys [N, h, C], to values [N, v, C]."""

    k: Any
    v: Any


# Epsilon of the two norms on low-rank projections, not rms_norm_eps: the reference implementation fixes it.
LOW_RANK_EPS = 1e-6


def queries(q: Float[Array, "B W N k"], cfg: ModelConfig, angles: Float[Array, "B W 2 r"]) -> Queries:
    """Projected queries, their rope part rotated."""
    nope, rope = jnp.split(q, [cfg.qk_nope_head_dim], axis=-1)
    return Queries(nope, rotate(rope, angles, cfg.rope_interleave))


def rows_of(
    kv: Float[Array, "B W C"], a: Attention, cfg: ModelConfig, angles: Float[Array, "B W 2 r"]
) -> Float[Array, "B W C"]:
    """Rows to cache, from the result of the latents' projection."""
    latent, key_rope = jnp.split(kv, [cfg.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, a.kv_norm, LOW_RANK_EPS)
    return jnp.concatenate([latent, rotate(key_rope, angles, cfg.rope_interleave)], axis=-1)


def attend(
    q: Queries,
    w: Ups,
    rows: Float[Array, "B L c"],
    mask: Bool[Array, "B W L"],
    scale: float,
    form: Form,
) -> Float[Array, "B W N v"]:
    """MLA over cached rows ``[latent | rope key]`` (arXiv 2405.04434, eqs. 9-19); softmax in float32.

    ``naive`` expands the latent to keys and values of every head; ``absorbed`` moves the expansion to the
    query and the output, so that all heads read the latent itself. Equal up to rounding. A token that sees
    nothing gets zeros.
    """
    latent, key_rope = jnp.split(rows, [w.k.shape[-1]], axis=-1)
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = wide("bwnr,blr->bnwl", q.rope, key_rope)
    if form == "absorbed":
        inward = jnp.einsum("bwnh,nhc->bwnc", q.nope, w.k)
        weights = masked_softmax(scores + wide("bwnc,blc->bnwl", inward, latent), mask, scale)
        mixed = jnp.einsum("bnwl,blc->bwnc", weights.astype(rows.dtype), latent)
        return jnp.einsum("bwnc,nvc->bwnv", mixed, w.v)
    keys = jnp.einsum("blc,nhc->blnh", latent, w.k)
    values = jnp.einsum("blc,nvc->blnv", latent, w.v)
    weights = masked_softmax(scores + wide("bwnh,blnh->bnwl", q.nope, keys), mask, scale)
    return jnp.einsum("bnwl,blnv->bwnv", weights.astype(rows.dtype), values)
