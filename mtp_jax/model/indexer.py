"""The lightning indexer of DeepSeek's sparse attention: the choice of cached entries to attend to.

arXiv 2512.02556, section 2.1, eq. 1: every entry gets a score, the sum over the index heads of w relu(q . k),
and the ``topk`` best are attended to. Scores are float32. The first entry wins among equal scores.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.top_k.reference import NOTHING, top_k
from mtp_jax.model.config import IndexerConfig
from mtp_jax.model.layers import rotate_first

# Epsilon of the norm on index keys: the reference implementation fixes it, as it does for the low ranks.
NORM_EPS = 1e-6

Choice = tuple[Int[Array, "_B _W _K"] | None, ...]
"""Rows that the tokens of each part of a pass attend to, or NOTHING (-1); None: all rows that they see.

Empty where no layer has chosen yet, or the model has no indexer.
"""


@struct.dataclass
class IndexQueries:
    """Queries of a token to index keys: one for each index head, and the weights of heads.

    Attributes:
        q: rotated, [B, W, H, i].
        weights: float32 [B, W, H], with the constants i^-0.5 and H^-0.5.
    """

    q: Float[Array, "B W H i"]
    weights: Float[Array, "B W H"]


def queries(
    q: Float[Array, "B W H i"],
    weights: Float[Array, "B W H"],
    index: IndexerConfig,
    angles: Float[Array, "B W 2 r"],
) -> IndexQueries:
    """Queries and weights from the results of their projections."""
    rotated = rotate_first(q, angles, index.interleaved)
    return IndexQueries(rotated, weights * (index.dim * index.heads) ** -0.5)


def keys(
    k: Float[Array, "B W i"],
    weight: Float[Array, " i"],
    bias: Float[Array, " i"],
    index: IndexerConfig,
    angles: Float[Array, "B W 2 r"],
) -> Float[Array, "B W i"]:
    """Index keys to cache, from the result of their projection: layer norm (arXiv 1607.06450), rope."""
    k32 = k.astype(jnp.float32)
    centred = k32 - k32.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + NORM_EPS)
    return rotate_first((centred * scale * weight + bias).astype(k.dtype), angles, index.interleaved)


def scores(q: IndexQueries, k: Float[Array, "B L i"]) -> Float[Array, "B W L"]:
    """Scores of every entry for every token, float32."""
    found = jnp.einsum("bwhi,bli->bwhl", q.q, k, preferred_element_type=jnp.float32)
    # Not `relu`: behind a product XLA on a CPU computes max(NaN, 0) as 0, and a broken score must show.
    positive = jnp.where(found < 0, 0.0, found)
    return jnp.einsum("bwhl,bwh->bwl", positive, q.weights, precision="highest")


def block_size(entries: int, heads: int, least: int) -> int:
    """Entries to score at a time, so that the heads' scores take no more memory than all scores do."""
    return min(max(-(-entries // heads), least), entries)


def scores_in_blocks(
    q: IndexQueries,
    read: Callable[[Int[Array, ""] | int], Float[Array, "B l i"]],
    size: int,
    entries: int,
    blocks: Int[Array, ""] | int,
) -> Float[Array, "B W L"]:
    """``scores`` of the first ``blocks`` blocks of ``size`` entries, as ``read`` gives them, then 0."""
    slots, width = q.weights.shape[:2]

    def block(i: Int[Array, ""] | int, found: Float[Array, "B W L"]) -> Float[Array, "B W L"]:
        return jax.lax.dynamic_update_slice_in_dim(found, scores(q, read(i)), i * size, axis=2)

    found = jnp.zeros((slots, width, -(-entries // size) * size), jnp.float32)
    return jax.lax.fori_loop(0, blocks, block, found)[..., :entries]


def masked(found: Float[Array, "B W L"], visible: Bool[Array, "B W L"]) -> Float[Array, "B W L"]:
    """Scores, -inf where not visible. A score that is not a number beats all: a broken score must show."""
    return jnp.where(visible, jnp.where(jnp.isnan(found), jnp.inf, found), -jnp.inf)


def best(found: Float[Array, "B W L"], count: int) -> Int[Array, "B W K"]:
    """The entries with the best of these scores, in order; NOTHING first where fewer are not -inf."""
    return top_k(found, count)


def chosen_mask(chosen: Int[Array, "B W K"], entries: int) -> Bool[Array, "B W L"]:
    """Whether each token attends to each of ``entries`` entries."""
    slots, width, _ = chosen.shape
    b, w = jnp.arange(slots)[:, None, None], jnp.arange(width)[None, :, None]
    at = jnp.where(chosen == NOTHING, entries, chosen)
    return jnp.zeros((slots, width, entries), bool).at[b, w, at].set(True, mode="drop")
