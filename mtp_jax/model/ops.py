"""Attention over the paged latent cache: write this pass's rows, then attend."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.sharding import partition, sharded

Form = Literal["naive", "absorbed"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedView:
    """Where one pass reads and writes in the cache. Page numbers are local to a slot's data shard.

    Attributes:
        page_table: pages of each slot in order, int32 [B, n]; the last page of all where there is none.
        positions: row that each window token is written to, int32 [B, W]; negative rows are not written.
        mask: rows each window token attends to, bool [B, W, n * S].
    """

    page_table: Int[Array, "B n"]
    positions: Int[Array, "B W"]
    mask: Bool[Array, "B W L"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queries:
    """Queries after projection: the part matched with the up-projected latent, and the rope part."""

    nope: Float[Array, "B W N h"]
    rope: Float[Array, "B W N R"]


def write_rows(
    pages: Float[Array, "P S C"],
    rows: Float[Array, "B W C"],
    page_table: Int[Array, "B n"],
    positions: Int[Array, "B W"],
) -> Float[Array, "P S C"]:
    """``pages`` with the window's rows written at ``positions``; in place when donated.

    Rows that are not to be written (negative positions) go to the last page, which no sequence owns; so do
    rows past the table, which an executable deeper than its slots ask for has.
    """
    count, size, _ = pages.shape
    columns = page_table.shape[1]
    written = (positions >= 0) & (positions < columns * size)
    column = jnp.clip(positions // size, 0, columns - 1)
    page = jnp.where(written, jnp.take_along_axis(page_table, column, axis=1), count - 1).reshape(-1)
    offset = (positions % size).reshape(-1)
    rows = rows.reshape(-1, 1, 1, rows.shape[-1])
    if jax.default_backend() != "cpu":
        return pages.at[page, offset].set(rows[:, 0, 0], mode="promise_in_bounds")

    # A scatter checks its bounds by a select, for which XLA on a CPU copies the whole cache several times.
    def write(i: Int[Array, ""], pages: Float[Array, "P S C"]) -> Float[Array, "P S C"]:
        return jax.lax.dynamic_update_slice(pages, rows[i], (page[i], offset[i], 0))

    # A loop of a length XLA cannot know is not unrolled and fused into the cache's readers, with copies.
    last = jnp.max(jnp.where(written.reshape(-1), jnp.arange(1, len(page) + 1), 0))
    return jax.lax.fori_loop(0, last, write, pages)


def read_rows(pages: Float[Array, "P S C"], view: PagedView) -> Float[Array, "B L C"]:
    """Every row of each slot's pages, zero where no window token may see it.

    Rows past the committed length hold garbage, NaN perhaps: a zero probability would not silence it.
    """
    rows = pages[view.page_table]
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    return jnp.where(view.mask.any(axis=1)[..., None], rows, 0)


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
        whole = jnp.concatenate([_absorb(q.nope, k_up), q.rope], axis=-1)
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


def _absorb(q: Float[Array, "B W N h"], k_up: Float[Array, "N h C"]) -> Float[Array, "B W N C"]:
    """Queries moved into the latent space.

    The barriers keep XLA on a CPU from swapping the operands, which makes the product four times slower.
    """
    slots, width, heads, _ = q.shape
    by_head = jax.lax.optimization_barrier(q.transpose(2, 0, 1, 3).reshape(heads, slots * width, -1))
    latent = jax.lax.dot_general(by_head, k_up, (((2,), (1,)), ((0,), (0,))))
    latent = jax.lax.optimization_barrier(latent).reshape(heads, slots, width, -1)
    return latent.transpose(1, 2, 0, 3)


def paged_attention(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    rows: Float[Array, "B W c"],
    pages: Float[Array, "P S c"],
    view: PagedView,
    *,
    scale: float,
    form: Form,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B W N v"], Float[Array, "P S c"]]:
    """Write the window's ``rows``, attend over everything visible. Returns (context, pages).

    With a mesh each device handles its own slots (``data``) and heads (``model``); the cache is replicated
    over ``model`` because all heads share it.
    """

    def local(q, k_up, v_up, rows, pages, view):
        with jax.named_scope("cache_write"):
            pages = write_rows(pages, rows, view.page_table, view.positions)
        with jax.named_scope("attend"):
            context = attend(q, k_up, v_up, read_rows(pages, view), view.mask, scale, form)
        return context, pages

    heads, per_slot = partition("slots", None, "heads", None), partition("slots")
    up, paged = partition("heads"), partition("pages")
    run = sharded(local, mesh, (heads, up, up, per_slot, paged, per_slot), (heads, paged))
    return run(q, k_up, v_up, rows, pages, view)


def write_tails(
    tails: Float[Array, "P one C"],
    rows: Float[Array, "B W C"],
    page_table: Int[Array, "B n"],
    page: Int[Array, "B W"],
    mesh: Mesh | None,
) -> Float[Array, "P one C"]:
    """``tails`` with ``rows`` written for the slot's ``page``-th page; negative: not written."""
    paged, per_slot = partition("pages"), partition("slots")
    with jax.named_scope("cache_write"):
        return sharded(write_rows, mesh, (paged, per_slot, per_slot, per_slot), paged)(
            tails, rows, page_table, page
        )
