"""Multi-head Latent Attention: queries and rows from results of projections."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.layers import rms_norm, rotate
from mtp_jax.model.params import Attention

Form = Literal["naive", "absorbed"]


@struct.dataclass
class Queries:
    """Queries after projection.

    Attributes:
        nope: the part matched with the up-projected latent.
        rope: the part matched with the shared rope key.
        inward: ``nope`` in the latent space, where a kernel has absorbed the keys' up-projection already.
        rows: shape [B, W, N * v] of all devices' results, where attention hands them to the output projection
            quantised; None: as arrays.
        index: the indexer's queries, which meet index keys; None in a layer without an indexer.
    """

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]
    inward: Float[Array, "B W N C"] | None = None
    index: IndexQueries | None = None
    rows: tuple[int, int, int] | None = struct.field(pytree_node=False, default=None)


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
