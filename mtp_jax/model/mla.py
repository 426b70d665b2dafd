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
    whole = jnp.concatenate([q.nope, q.rope], axis=-1).transpose(0, 2, 1, 3)
    scores = _dots(_fixed(whole), _keys(rows, k_up), (3, 2))
    scores = jnp.where(mask[:, None], scores * scale, -jnp.inf)
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), _LEAST)
    weights = jnp.exp(scores - peak)
    weights = (weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).astype(rows.dtype)
    context = _dots(_expand(rows[..., : k_up.shape[-1]], v_up), _fixed(weights), (3, 3))
    return context.transpose(0, 3, 1, 2).astype(rows.dtype)


def attend_in_blocks(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    read: Callable[[Int[Array, ""] | int], tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]],
    blocks: Int[Array, ""] | int,
    scale: float,
    form: Form = "absorbed",
) -> Float[Array, "B W N v"]:
    """``attend`` over the rows and the mask of each of ``blocks`` blocks, by ``read``.

    The softmax is summed on the way (arXiv 1805.02867, algorithm 3). A block that a token does not see
    leaves what it has to the bit, so a result does not depend on how many blocks others need.
    """
    rank, (slots, width, heads, _) = k_up.shape[-1], q.nope.shape
    by_head = (slots, heads, width)
    if form == "absorbed":
        # All heads read the same rows: one product for all.
        queries = jnp.concatenate([absorb(q.nope, k_up), q.rope], axis=-1).transpose(0, 2, 1, 3)
        lead, mixes = (slots, heads * width), queries.shape[-1]
    else:
        queries = jnp.concatenate([q.nope, q.rope], axis=-1).transpose(0, 2, 1, 3)
        lead, mixes = by_head, v_up.shape[1]
    flat = _fixed(queries.reshape(*lead, -1))

    def block(i: Int[Array, ""] | int, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = so_far
        rows, mask = read(i)
        sees = jnp.broadcast_to(mask[:, None], (*by_head, mask.shape[-1])).reshape(*lead, -1)
        absorbed = form == "absorbed"
        scores = _dots(flat, rows, (2, 2)) if absorbed else _dots(flat, _keys(rows, k_up), (3, 2))
        scores = jnp.where(sees, scores * scale, -jnp.inf)
        top = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights, shrunk = jnp.exp(scores - top), jnp.exp(peak - top)
        narrow = _fixed(weights.astype(rows.dtype))
        if absorbed:
            # Whole rows: slicing the rope part off the result is cheaper than off the cache.
            more = _dots(narrow, rows, (2, 1))
        else:
            more = _dots(narrow, _expand(rows[..., :rank], v_up), (3, 3))
        return top, total * shrunk + weights.sum(axis=-1, keepdims=True), mixed * shrunk + more

    start = jnp.full((*lead, 1), _LEAST), jnp.zeros((*lead, 1)), jnp.zeros((*lead, mixes))
    alone = isinstance(blocks, int) and blocks == 1
    _, total, mixed = block(0, start) if alone else jax.lax.fori_loop(0, blocks, block, start)
    context = (mixed / jnp.maximum(total, 1e-30)).astype(queries.dtype)
    if form == "naive":
        return context.swapaxes(1, 2)
    return jnp.einsum("bnwc,nvc->bwnv", context[..., :rank].reshape(*by_head, rank), v_up)


def _fixed(x: jax.Array) -> jax.Array:
    """Keeps XLA on a CPU from swapping a product's operands, or turning them: up to four times slower."""
    return jax.lax.optimization_barrier(x) if platform() == "cpu" else x


def _keys(rows: Float[Array, "B L c"], k_up: Float[Array, "N h C"]) -> Float[Array, "B N k L"]:
    """Keys of every head, the shared rope part included, a column for each cached row."""
    latent, key_rope = jnp.split(rows, [k_up.shape[-1]], axis=-1)
    keys = _expand(latent, k_up)
    shared = jnp.broadcast_to(key_rope.swapaxes(1, 2)[:, None], (*keys.shape[:2], *key_rope.shape[:0:-1]))
    return jnp.concatenate([keys, shared], axis=2)


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
