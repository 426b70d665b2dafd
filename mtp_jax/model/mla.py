"""Multi-head Latent Attention over rows at hand, in its two forms, by XLA."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mtp_jax.model.device import platform

Form = Literal["naive", "absorbed"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries after projection: the part matched with the up-projected latent, and the rope part."""

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]


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
        keys = jnp.einsum("blc,nhc->blnh", latent, k_up)
        scores = jnp.einsum("bwnh,blnh->bnwl", q.nope, keys, preferred_element_type=jnp.float32)
        scores += jnp.einsum("bwnr,blr->bnwl", q.rope, key_rope, preferred_element_type=jnp.float32)
    else:
        whole = jnp.concatenate([absorb(q.nope, k_up), q.rope], axis=-1)
        scores = jnp.einsum("bwnc,blc->bnwl", whole, rows, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    # A row that sees nothing (an idle slot) must give zeros, not NaN.
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - peak)
    weights = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).astype(rows.dtype)
    if form == "naive":
        return jnp.einsum("bnwl,blnv->bwnv", weights, jnp.einsum("blc,nvc->blnv", rows[..., :rank], v_up))
    # Whole rows again: slicing the rope part off the result is cheaper than off the cache.
    mixed = jnp.einsum("bnwl,blc->bwnc", weights, rows)[..., :rank]
    return jnp.einsum("bwnc,nvc->bwnv", mixed, v_up)


def absorb(q: Float[Array, "B W N h"], k_up: Float[Array, "N h C"]) -> Float[Array, "B W N C"]:
    """Queries moved into the latent space.

    The barriers keep XLA on a CPU from swapping the operands, which makes the product four times slower.
    """
    if platform() != "cpu":
        return jnp.einsum("bwnh,nhc->bwnc", q, k_up)
    slots, width, heads, _ = q.shape
    by_head = jax.lax.optimization_barrier(q.transpose(2, 0, 1, 3).reshape(heads, slots * width, -1))
    latent = jax.lax.dot_general(by_head, k_up, (((2,), (1,)), ((0,), (0,))))
    latent = jax.lax.optimization_barrier(latent).reshape(heads, slots, width, -1)
    return latent.transpose(1, 2, 0, 3)
