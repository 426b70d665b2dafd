"""Grouped-query attention (arXiv 2305.13245), as GLM-4.5 to 4.7 have it.

A row of the cache is [keys of every kv head | values of every kv head]; keys are normed and rotated before
they are cached. On a mesh every device holds whole rows, and attends with its own query heads.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.model.attention.kind import OverRows
from mtp_jax.model.attention.source import Chosen, Source
from mtp_jax.model.cache import Cache, Entries, Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import masked_softmax, rms_norm, rotate_first
from mtp_jax.model.params import GqaAttention
from mtp_jax.model.products.plain import Rows

if TYPE_CHECKING:  # it imports the kernels, which a CPU has no use for
    from mtp_jax.model.products.hopper import HopperProducts


@struct.dataclass
class Queries:
    """Queries, normed and rotated, [B, W, N, h]."""

    whole: Float[Array, "B W N h"]
    index: None = None


@struct.dataclass
class KvHeads:
    """The kv head of each query head.

    Attributes:
        of: kv head of each query head; the first entry shows where a device's kv heads begin.
        count: number of kv heads of a row.
        group: number of query heads that share a kv head.
    """

    of: Int[Array, " N"]
    count: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)


@dataclass(frozen=True)
class Gqa(OverRows):
    """Grouped-query attention in plain XLA."""

    def queries(self, a: GqaAttention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Queries:
        """Projected, with bias and norm where the model has them, their first channels rotated."""
        return Queries(_turned(_plus(self.on.linear(x, a.q, split="out"), a.q_bias), a.q_norm, cfg, angles))

    def entries(self, a: GqaAttention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Entries:
        """Keys, as queries are made, and values as they are projected."""
        keys = _turned(_plus(self.on.linear(x, a.k), a.k_bias), a.k_norm, cfg, angles)
        values = _plus(self.on.linear(x, a.v), a.v_bias)
        return Entries(jnp.concatenate([a.reshape(*a.shape[:2], -1) for a in (keys, values)], axis=-1))

    def by_head(self, a: GqaAttention, cfg: ModelConfig) -> KvHeads:
        """The kv head of each query head."""
        assert cfg.gqa is not None, "a layer with grouped-query attention has a configuration of it"
        heads = a.q.shape[0]
        group = heads // cfg.gqa.kv_heads
        return KvHeads(jnp.arange(heads) // group, cfg.gqa.kv_heads, group)

    def attend(self, q: Queries, w: KvHeads, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """Attention over rows [keys | values], softmax in float32. Rows that no token sees are zeros.

        q: queries of all heads, or of one device's heads, which are whole groups or lie within one group.
        """
        assert not isinstance(source, Chosen), "there is no indexer that could have chosen"
        (rows, mask), asked = source.read(q.whole.dtype), self.by_group(q.whole, w)
        slots, width, groups, heads, _ = asked.shape
        keys, values = self.of_groups(rows, w, groups)
        scores = jnp.einsum("bwgqh,blgh->bgqwl", asked, keys, preferred_element_type=jnp.float32)
        scores = scores.reshape(slots, groups * heads, width, -1)
        weights = masked_softmax(scores, mask, scale).astype(rows.dtype)
        by_group = weights.reshape(slots, groups, heads, width, -1)
        return jnp.einsum("bgqwl,blgh->bwgqh", by_group, values).reshape(q.whole.shape)

    @staticmethod
    def by_group(whole: Float[Array, "B W N h"], w: KvHeads) -> Float[Array, "B W G Q h"]:
        """The queries by the kv head that they share."""
        slots, width, heads, dim = whole.shape
        groups = max(heads // w.group, 1)
        return whole.reshape(slots, width, groups, heads // groups, dim)

    @staticmethod
    def of_groups(
        rows: Float[Array, "B L c"], w: KvHeads, groups: int
    ) -> tuple[Float[Array, "B L G h"], Float[Array, "B L G h"]]:
        """Keys and values of the kv heads that ``groups`` groups of this device's queries share."""
        both = [a.reshape(*rows.shape[:2], w.count, -1) for a in jnp.split(rows, 2, axis=-1)]
        if groups < w.count:
            both = [jax.lax.dynamic_slice_in_dim(a, w.of[0], groups, axis=2) for a in both]
        return both[0], both[1]


@dataclass(frozen=True)
class HopperGqa(Gqa):
    """Grouped-query attention in plain XLA. Raises ConfigError where kernels are required."""

    on: "HopperProducts"

    def project(
        self,
        a: GqaAttention,
        cfg: ModelConfig,
        x: Rows,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Queries, Entries | None, Cache | None]:
        """Queries, entries and the cache. Raises ConfigError where kernels are required."""
        self.on.do_without("mla_decode", "grouped-query attention")
        return super().project(a, cfg, x, angles, cache, views)


def _plus(x: Float[Array, "B W N h"], bias: Float[Array, " Nh"] | None) -> Float[Array, "B W N h"]:
    return x if bias is None else x + bias.reshape(x.shape[2:])


def _turned(
    x: Float[Array, "B W N h"],
    norm: Float[Array, " h"] | None,
    cfg: ModelConfig,
    angles: Float[Array, "B W 2 r"],
) -> Float[Array, "B W N h"]:
    normed = x if norm is None else rms_norm(x, norm, cfg.rms_norm_eps)
    return rotate_first(normed, angles, cfg.rope_interleave)
