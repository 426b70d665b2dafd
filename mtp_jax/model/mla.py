"""Multi-head Latent Attention over rows at hand, in its two forms, by XLA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform

Form = Literal["naive", "absorbed"]

# The least peak of scores: a token that sees nothing (an idle slot) must get zeros, not NaN.
_LEAST = jnp.finfo(jnp.float32).min


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries after projection: the part matched with the up-projected latent, and the rope part."""

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]


def prefill_form(cfg: ModelConfig, window: int) -> Form:
    """The form that takes fewer operations for ``window`` tokens over long histories.

    naive: every cached row is expanded once, (h + v) * C for each head; absorbed: each token pays 2 C - h - v
    more per row. A GPU always takes the naive form, which its kernel is for.
    """
    expanded, rank = cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank
    few = window * (2 * rank - expanded) <= expanded * rank
    return "absorbed" if few and platform() == "cpu" else "naive"


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
    if form == "absorbed":
        return attend_in_blocks(q, k_up, v_up, lambda _: (rows, mask), 1, scale)
    latent, key_rope = jnp.split(rows, [k_up.shape[-1]], axis=-1)
    keys = _expand(latent, k_up)
    shared = jnp.broadcast_to(key_rope.swapaxes(1, 2)[:, None], (*keys.shape[:2], *key_rope.shape[:0:-1]))
    whole = jnp.concatenate([q.nope, q.rope], axis=-1).transpose(0, 2, 1, 3)
    scores = _dots(_fixed(whole), jnp.concatenate([keys, shared], axis=2), (3, 2))
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), _LEAST)
    weights = jnp.exp(scores - jax.lax.stop_gradient(peak))  # the result does not depend on it
    weights = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).astype(rows.dtype)
    context = _dots(_expand(latent, v_up), _fixed(weights), (3, 3))
    return context.transpose(0, 3, 1, 2).astype(rows.dtype)


def attend_in_blocks(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    read: Callable[[Int[Array, ""] | int], tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]],
    blocks: Int[Array, ""] | int,
    scale: float,
) -> Float[Array, "B W N v"]:
    """``attend`` in the absorbed form over the rows and the mask of each of ``blocks`` blocks, by ``read``.

    The softmax is summed on the way (arXiv 1805.02867, algorithm 3). A block that a token does not see
    leaves what it has to the bit, so a result does not depend on how many blocks others need.
    """
    whole = jnp.concatenate([absorb(q.nope, k_up), q.rope], axis=-1)
    slots, width, heads, _ = whole.shape
    flat = _fixed(whole.transpose(0, 2, 1, 3).reshape(slots, heads * width, -1))

    def block(i: Int[Array, ""] | int, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = so_far
        rows, mask = read(i)
        sees = jnp.broadcast_to(mask[:, None], (slots, heads, *mask.shape[1:])).reshape(*flat.shape[:2], -1)
        scores = jnp.where(sees, _dots(flat, rows, (2, 2)) * scale, -jnp.inf)
        top = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights, shrunk = jnp.exp(scores - top), jnp.exp(peak - top)
        # Whole rows: slicing the rope part off the result is cheaper than off the cache.
        more = _dots(_fixed(weights.astype(rows.dtype)), rows, (2, 1))
        return top, total * shrunk + weights.sum(axis=-1, keepdims=True), mixed * shrunk + more

    one = (*flat.shape[:2], 1)
    start = jnp.full(one, _LEAST), jnp.zeros(one), jnp.zeros(flat.shape)
    alone = isinstance(blocks, int) and blocks == 1
    _, total, mixed = block(0, start) if alone else jax.lax.fori_loop(0, blocks, block, start)
    latent = (mixed / jnp.maximum(total, 1e-30)).astype(whole.dtype)[..., : k_up.shape[-1]]
    return jnp.einsum("bnwc,nvc->bwnv", latent.reshape(slots, heads, width, -1), v_up)


def _fixed(x: jax.Array) -> jax.Array:
    """Keeps XLA on a CPU from swapping a product's operands, or turning them: up to four times slower."""
    return jax.lax.optimization_barrier(x) if platform() == "cpu" else x


def _expand(latent: Float[Array, "B L C"], up: Float[Array, "N o C"]) -> Float[Array, "B N o L"]:
    """Keys or values of every head, a column for each cached row."""
    (slots, length, rank), heads = latent.shape, len(up)
    dims = (((1,), (1,)), ((), ()))
    columns = jax.lax.dot_general(up.reshape(-1, rank), latent.reshape(-1, rank), dims)
    return _fixed(columns).reshape(heads, -1, slots, length).transpose(2, 0, 1, 3)


def _dots(
    a: Float[Array, "*b x y"], b: Float[Array, "*b z t"], contracted: tuple[int, int]
) -> Float[Array, "*b s u"]:
    """Products of every slot, or slot and head, in float32."""
    batch = tuple(range(a.ndim - 2))
    dims = ((contracted[:1], contracted[1:]), (batch, batch))
    return _fixed(jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32))


def absorb(q: Float[Array, "B W N h"], k_up: Float[Array, "N h C"]) -> Float[Array, "B W N C"]:
    """Queries moved into the latent space."""
    if platform() != "cpu":
        return jnp.einsum("bwnh,nhc->bwnc", q, k_up)
    slots, width, heads, _ = q.shape
    by_head = _fixed(q.transpose(2, 0, 1, 3).reshape(heads, slots * width, -1))
    latent = _fixed(jax.lax.dot_general(by_head, k_up, (((2,), (1,)), ((0,), (0,)))))
    return latent.reshape(heads, slots, width, -1).transpose(1, 2, 0, 3)
