"""Operations that XLA or a kernel can compute: routed experts, and attention over the paged latent cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.mla_decode import api as mla_decode
from kernels_pallas.mla_decode.fp8_rows import pack, unpack
from kernels_pallas.mla_decode.visible import MAX_AHEAD, Visible
from kernels_pallas.mla_low_rank import api as mla_low_rank
from kernels_pallas.mla_prefill import api as mla_prefill
from kernels_pallas.mla_prefill.limits import Limits
from kernels_pallas.quantised import Quantised
from kernels_pallas.router import api as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import products
from mtp_jax.model.cache import Fp8Rows, PagedView, Pages, read_rows, write_rows
from mtp_jax.model.device import platform
from mtp_jax.model.kernels import AUTO, Kernels, can, may_run, runs
from mtp_jax.model.mla import Form, Queries, absorb, attend, attend_in_blocks
from mtp_jax.model.params import Fp8
from mtp_jax.model.sharding import partition, sharded

Cache = TypeVar("Cache", bound=Pages)

# Cached rows that attention on a CPU takes at a time: a quarter of the table, within these bounds. Fewer cost
# more than they compute, more do not stay in a core's cache.
_BLOCK = 64, 128


def experts_take_quantised(kernels: Kernels, dtype: Any, gate_up: Any, down: Any) -> bool:
    """Whether ``experts`` computes them, activations in e4m3."""
    x = jax.ShapeDtypeStruct((1, 1), dtype)
    return isinstance(gate_up, Fp8) and isinstance(down, Fp8) and runs_experts(kernels, x, gate_up, down)


def runs_experts(kernels: Kernels, x: Any, gate_up: Any, down: Any) -> bool:
    """Whether ``experts`` computes a device's routed experts, of weights [E, 2, I, D] and [E, D, I].

    Raises ConfigError if it is wanted and cannot.
    """
    return runs(kernels.experts, _check_experts, x, gate_up, down)


def choose_experts(
    logits: Float[Array, "T E"], bias: Float[Array, " E"], rule: Rule, kernels: Kernels
) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Int[Array, "n E"] | None]:
    """Ids and weights of each row's experts; their counts too if a kernel chooses, where experts have any."""
    if not (may_run(kernels.experts) and router.can_choose(logits.shape[1], rule)):
        return *router.reference.choose(logits, bias, rule), None
    choice = router.choose(logits, bias, rule, implementation="mosaic_gpu")
    return choice.ids, choice.weights, choice.counts


def experts(
    gate_up: Any,
    down: Any,
    x: Float[Array, "T D"] | Quantised,
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    counts: Int[Array, "n E"] | None,
    first: Int[Array, ""] | int,
    rows_per_expert: int,
) -> Float[Array, "T D"]:
    """Each row's experts of those from ``first`` on, weighted, by the kernels; others contribute nothing."""
    (gate_up, gate_up_scale), (down, down_scale) = _arrays(gate_up), _arrays(down)
    return grouped_matmul.expert_mlp(
        x,
        ids,
        weights,
        gate_up,
        down,
        gate_up_scale,
        down_scale,
        counts=counts,
        first=first,
        rows_per_expert=rows_per_expert,
        implementation="mosaic_gpu",
    )


def _check_experts(x: Any, gate_up: Any, down: Any) -> None:
    """Raise ValueError for what the kernel cannot do."""
    if isinstance(gate_up, Fp8) != isinstance(down, Fp8):
        raise ValueError(
            "grouped_matmul on mosaic_gpu: experts' gate, up and down are FP8 together or not at all"
        )
    for w in (gate_up, down):
        grouped_matmul.check(x, *_arrays(w))


def _arrays(w: Any) -> tuple[Any, Any]:
    return (w.values, w.scale) if isinstance(w, Fp8) else (w, None)


def packed(rows: Float[Array, "*b c"], rank: int) -> Fp8Rows:
    """Rows [latent | rope key] as an FP8 cache has them; ``rank`` is the latent's."""
    return Fp8Rows(*pack(rows, rank))


def as_stored(rows: Float[Array, "B W c"], pages: Pages, rank: int) -> Float[Array, "B W c"] | Fp8Rows:
    """Rows as this cache has them."""
    return packed(rows, rank) if isinstance(pages, Fp8Rows) else rows


def norms_low_rank(kernels: Kernels, q: Any, kv: Any, kv_norm: Any, pages: Pages) -> bool:
    """Whether ``low_rank`` takes what the projections leave."""
    plain = None if isinstance(pages, Fp8Rows) else pages
    return may_run(kernels.attention) and can(mla_low_rank.check, q, kv, kv_norm, plain)


def low_rank(
    q: Float[Array, "*s B W K"],
    kv: Float[Array, "*u B W c"],
    q_norm: Float[Array, " K"],
    kv_norm: Float[Array, " C"],
    angles: Float[Array, "B W 2 r"],
    pages: Pages,
    view: PagedView,
    *,
    eps: float,
    interleaved: bool,
    mesh: Mesh | None,
) -> tuple[products.Rows, Float[Array, "B W c"] | None, Pages]:
    """Queries' low rank normed and quantised, and the window's rows written, by the kernel.

    Rows for an FP8 cache are returned, not written.
    """
    fp8 = isinstance(pages, Fp8Rows)

    def local(q, kv, q_norm, kv_norm, angles, pages, view):
        where = (pages, view.page_table, view.positions)
        options: dict[str, Any] = {"eps": eps, "interleaved": interleaved, "implementation": "mosaic_gpu"}
        low, out = mla_low_rank.mla_low_rank(q, kv, q_norm, kv_norm, angles, *where, **options)
        return (low.values, low.scale), out

    slots, weight = partition("slots"), partition()
    parts = (partition(None, "slots") if a.ndim == 4 else slots for a in (q, kv))
    specs = (*parts, weight, weight, slots, partition("pages"), slots)
    run = sharded(local, mesh, specs, (products.of_rows(), slots if fp8 else partition("pages")))
    with jax.named_scope("cache_write"):
        cos_sin = angles[..., 0, :], angles[..., 1, :]
        low, out = run(q, kv, q_norm, kv_norm, cos_sin, None if fp8 else pages, view)
    rows = products.Rows(q.shape[-3:], None, Quantised(*low))
    return (rows, out, pages) if fp8 else (rows, None, out)


def paged_attention(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    rows: Float[Array, "B W c"] | None,
    pages: Pages,
    view: PagedView,
    *,
    scale: float,
    form: Form,
    mesh: Mesh | None,
    kernels: Kernels = AUTO,
) -> tuple[Float[Array, "B W N v"], Pages]:
    """Write the window's ``rows`` if given, attend over everything visible. Returns (context, pages).

    What a token sees of the window comes from the cache as well, so that an FP8 cache gives the same result
    whatever was computed together.

    With a mesh each device handles its own slots (``data``) and heads (``model``); the cache is replicated
    over ``model`` because all heads share it.
    """

    rank = k_up.shape[-1]

    def local(q, k_up, v_up, rows, pages, view):
        with jax.named_scope("cache_write"):
            if rows is not None:
                pages = write_rows(pages, as_stored(rows, pages, rank), view.page_table, view.positions)
        with jax.named_scope("attend"):
            if form == "absorbed" and runs(kernels.attention, _check_decode, q, k_up, pages):
                context = _decode(q, k_up, v_up, pages, view, scale)
            elif form == "naive" and runs(kernels.attention, _check_prefill, q, k_up, v_up):
                context = _prefill(q, k_up, v_up, cached(pages, view), view, scale)
            elif form == "absorbed" and platform() == "cpu":
                context = _attend_seen(q, k_up, v_up, partial(cached, pages), view, scale, pages.shape[1])
            else:
                context = attend(q, k_up, v_up, cached(pages, view), view.mask, scale, form)
        return context, pages

    def cached(pages, view):
        found = read_rows(pages, view)
        if not isinstance(found, Fp8Rows):
            return found
        return unpack((found.words, found.scales), rank).astype(v_up.dtype)

    heads, per_slot = partition("slots", None, "heads", None), partition("slots")
    up, paged = partition("heads"), partition("pages")
    run = sharded(local, mesh, (heads, up, up, per_slot, paged, per_slot), (heads, paged))
    return run(q, k_up, v_up, rows, pages, view)


def _attend_seen(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    cached: Callable[[PagedView], Float[Array, "B l c"]],
    view: PagedView,
    scale: float,
    page: int,
) -> Float[Array, "B W N v"]:
    """``attend`` over no more blocks of the cached rows than hold what any token sees."""
    columns = view.page_table.shape[1]
    length = columns * page
    each = min(max(int(np.clip(length // 4, *_BLOCK)) // page, 1), columns)
    padding = -columns % each
    table = jnp.pad(view.page_table, ((0, 0), (0, padding)))
    mask = jnp.pad(view.mask, ((0, 0), (0, 0), (0, padding * page)))

    def read(i: Int[Array, ""] | int) -> tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]:
        pages = jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1)
        part = jax.lax.dynamic_slice_in_dim(mask, i * each * page, each * page, axis=2)
        return cached(PagedView(pages, view.positions, part)), part

    if columns == each:
        return attend_in_blocks(q, k_up, v_up, read, 1, scale)
    last = jnp.max(jnp.where(view.mask.any(axis=(0, 1)), jnp.arange(1, length + 1), 0))
    return attend_in_blocks(q, k_up, v_up, read, -(-last // (each * page)), scale)


def _check_decode(q: Queries, k_up: Float[Array, "N h C"], pages: Pages) -> None:
    """Raise ValueError for what the kernel cannot do."""
    window = q.rope.shape[1]
    if window > MAX_AHEAD + 1:  # all tokens see the first one's row
        raise ValueError(f"mla_decode on mosaic_gpu: a window of {window} tokens, at most {MAX_AHEAD + 1}")
    mla_decode.check(absorb(q.nope, k_up), q.rope, _parts(pages))


def _parts(pages: Pages) -> Any:
    """Pages as the kernel takes them."""
    return (pages.words, pages.scales) if isinstance(pages, Fp8Rows) else pages


def _decode(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    pages: Pages,
    view: PagedView,
    scale: float,
) -> Float[Array, "B W N v"]:
    """``attend`` in the absorbed form by the kernel, which reads the pages where they are."""
    mixed = mla_decode.mla_decode(
        absorb(q.nope, k_up),
        q.rope,
        _parts(pages),
        view.page_table,
        visible(view.mask),
        scale=scale,
        implementation="mosaic_gpu",
        in_place=True,
    )
    return jnp.einsum("bwnc,nvc->bwnv", mixed, v_up)


def _check_prefill(q: Queries, k_up: Float[Array, "N h C"], v_up: Float[Array, "N v C"]) -> None:
    """Raise ValueError for what the kernel cannot do."""
    whole = jnp.concatenate([q.nope, q.rope], axis=-1)
    mla_prefill.check(whole, q.nope, q.rope, v_up.swapaxes(1, 2))


def _prefill(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    rows: Float[Array, "B L c"],
    view: PagedView,
    scale: float,
) -> Float[Array, "B W N v"]:
    """``attend`` in the naive form by the kernel."""
    whole = jnp.concatenate([q.nope, q.rope], axis=-1)
    return mla_prefill.mla_prefill(
        whole, rows, k_up, v_up, limits(view.mask), scale=scale, implementation="mosaic_gpu"
    )


def limits(mask: Bool[Array, "B W L"]) -> Limits:
    """The mask as the prefill kernel takes it; it must be causal: each token sees one row more."""
    row, token = jnp.arange(mask.shape[2]), jnp.arange(mask.shape[1])
    seen, sees = mask.any(axis=1), mask.any(axis=2)
    last = jnp.max(jnp.where(mask, row, -1), axis=2)
    bounds = (
        jnp.max(jnp.where(sees, token + 1, 0), axis=1),
        jnp.argmax(seen, axis=1),
        jnp.max(jnp.where(sees, last - token, -mask.shape[1]), axis=1),
        jnp.max(jnp.where(seen, row + 1, 0), axis=1),
    )
    return Limits(*(b.astype(jnp.int32) for b in bounds))


def visible(mask: Bool[Array, "B W L"]) -> Visible:
    """The mask as the kernel takes it: rows that all tokens of a slot see, then a bit for each that follows.

    Rows that only some see must lie among the first 31 after those. A token that sees nothing gets the rows
    of the others: its output is not used, and what it sees is then a prefix.
    """
    rows = mask.shape[-1]
    row = jnp.arange(rows)
    seen = mask.any(axis=1)
    by_all = (mask | ~mask.any(axis=2, keepdims=True)).all(axis=1) & seen
    first = jnp.argmax(seen, axis=1).astype(jnp.int32)
    length = jnp.min(jnp.where((row >= first[:, None]) & ~by_all, row, rows), axis=1).astype(jnp.int32)
    index = length[:, None] + jnp.arange(MAX_AHEAD)
    bits = jnp.take_along_axis(mask, jnp.minimum(index, rows - 1)[:, None], axis=2) & (index < rows)[:, None]
    ahead = jnp.sum(bits << jnp.arange(MAX_AHEAD), axis=2, dtype=jnp.int32)
    return Visible(first, length, ahead)


def write(
    pages: Cache,
    rows: Float[Array, "B W c"] | Fp8Rows,
    page_table: Int[Array, "B n"],
    positions: Int[Array, "B W"],
    mesh: Mesh | None,
) -> Cache:
    """``write_rows`` on a mesh: each device its own slots."""
    paged, per_slot = partition("pages"), partition("slots")
    with jax.named_scope("cache_write"):
        run = sharded(write_rows, mesh, (paged, per_slot, per_slot, per_slot), paged)
        return run(pages, rows, page_table, positions)
