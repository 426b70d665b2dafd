"""Operations that XLA or a kernel can compute: routed experts, and attention over the paged latent cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.mla_decode import api as mla_decode
from kernels_pallas.mla_low_rank import api as mla_low_rank
from kernels_pallas.mla_prefill import api as mla_prefill
from kernels_pallas.quantised import Quantised
from kernels_pallas.router import api as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import products
from mtp_jax.model.cache import LayerCache, PagedView, Tree, read_rows, write_rows
from mtp_jax.model.device import platform
from mtp_jax.model.kernels import AUTO, Kernels, can, may_run, runs
from mtp_jax.model.mla import Queries, absorb, attend, attend_in_blocks
from mtp_jax.model.params import Fp8
from mtp_jax.model.sharding import partition, sharded

# Cached rows that absorbed attention on a CPU takes at a time: a quarter of the table, within these bounds.
# Fewer cost more than they compute, more do not stay in a core's cache.
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


def norms_low_rank(kernels: Kernels, q: Any, kv: Any, kv_norm: Any, cache: LayerCache) -> bool:
    """Whether ``low_rank`` takes what the projections leave."""
    plain = None if cache.fp8 else cache.latent
    return may_run(kernels.attention) and can(mla_low_rank.check, q, kv, kv_norm, plain)


def low_rank(
    q: Float[Array, "*s B W K"],
    kv: Float[Array, "*u B W c"],
    q_norm: Float[Array, " K"],
    kv_norm: Float[Array, " C"],
    angles: Float[Array, "B W 2 r"],
    cache: LayerCache,
    view: PagedView,
    *,
    eps: float,
    interleaved: bool,
    mesh: Mesh | None,
) -> tuple[products.Rows, Float[Array, "B W c"] | None, LayerCache]:
    """Queries' low rank normed and quantised, and the window's rows written, by the kernel.

    Rows for an FP8 cache are returned, not written.
    """
    fp8 = cache.fp8

    def local(q, kv, q_norm, kv_norm, angles, pages, view):
        where = (pages, view.page_table, view.written)
        options: dict[str, Any] = {"eps": eps, "interleaved": interleaved, "implementation": "mosaic_gpu"}
        low, out = mla_low_rank.mla_low_rank(q, kv, q_norm, kv_norm, angles, *where, **options)
        return (low.values, low.scale), out

    slots, weight = partition("slots"), partition()
    parts = (partition(None, "slots") if a.ndim == 4 else slots for a in (q, kv))
    specs = (*parts, weight, weight, slots, partition("pages"), slots)
    run = sharded(local, mesh, specs, (products.of_rows(), slots if fp8 else partition("pages")))
    with jax.named_scope("cache_write"):
        cos_sin = angles[..., 0, :], angles[..., 1, :]
        low, out = run(q, kv, q_norm, kv_norm, cos_sin, None if fp8 else cache.latent, view)
    rows = products.Rows(q.shape[-3:], None, Quantised(*low))
    return (rows, out, cache) if fp8 else (rows, None, LayerCache(out))


def paged_attention(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    rows: Float[Array, "B W c"] | None,
    cache: LayerCache,
    view: PagedView,
    *,
    scale: float,
    mesh: Mesh | None,
    kernels: Kernels = AUTO,
) -> tuple[Float[Array, "B W N v"], LayerCache]:
    """Write the window's ``rows`` if given, attend over everything visible. Returns (context, cache).

    What a token sees of the window comes from the cache as well, so that an FP8 cache gives the same result
    whatever was computed together.

    With a mesh each device handles its own slots (``data``) and heads (``model``); the cache is replicated
    over ``model`` because all heads share it.
    """
    rank, form = k_up.shape[-1], view.form

    def local(q, k_up, v_up, rows, cache, view):
        with jax.named_scope("cache_write"):
            if rows is not None:
                cache = write_rows(cache, cache.stored(rows, rank), view.page_table, view.written)
        with jax.named_scope("attend"):
            if form == "absorbed" and runs(kernels.attention, _check_decode, q, k_up, cache):
                return _decode(q, k_up, v_up, cache, view, scale), cache
            by_kernel = form == "naive" and runs(kernels.attention, _check_prefill, q, k_up, v_up)
            if platform() == "cpu" and not by_kernel:
                return _attend_seen(q, k_up, v_up, cache, view, scale), cache
            seen = view.visible.seen(view.page_table.shape[1] * cache.page_size)
            found = read_rows(cache, view.page_table, seen, v_up.dtype, rank)
            if by_kernel:
                return _prefill(q, k_up, v_up, found, view, scale), cache
            mask = view.visible.mask(q.rope.shape[1], found.shape[1])
            return attend(q, k_up, v_up, found, mask, scale, form), cache

    heads, per_slot = partition("slots", None, "heads", None), partition("slots")
    up, paged = partition("heads"), partition("pages")
    run = sharded(local, mesh, (heads, up, up, per_slot, paged, per_slot), (heads, paged))
    return run(q, k_up, v_up, rows, cache, view)


def _attend_seen(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    cache: LayerCache,
    view: PagedView,
    scale: float,
) -> Float[Array, "B W N v"]:
    """``attend`` over no more blocks of the cached rows than hold what any token sees."""
    columns, page, width = view.page_table.shape[1], cache.page_size, q.rope.shape[1]
    length = columns * page
    # Naive attention expands a block for as many tokens as the block has rows.
    rows = int(np.clip(length // 4, *_BLOCK)) if view.form == "absorbed" else width
    each = min(max(rows // page, 1), columns)
    table = jnp.pad(view.page_table, ((0, 0), (0, -columns % each)))

    def read(i: Int[Array, ""] | int) -> tuple[Float[Array, "B l c"], Bool[Array, "B W l"]]:
        pages, start = jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1), i * each * page
        # A window deeper than its slot asks for goes past the table, never into what fills the last block.
        inside = start + jnp.arange(each * page) < length
        seen, mask = view.visible.seen(each * page, start), view.visible.mask(width, each * page, start)
        return read_rows(cache, pages, seen & inside, v_up.dtype, k_up.shape[-1]), mask & inside

    if columns == each:
        return attend_in_blocks(q, k_up, v_up, read, 1, scale, view.form)
    last = jnp.minimum(jnp.max(view.visible.end()), length)
    return attend_in_blocks(q, k_up, v_up, read, -(-last // (each * page)), scale, view.form)


def _check_decode(q: Queries, k_up: Float[Array, "N h C"], cache: LayerCache) -> None:
    """Raise ValueError for what the kernel cannot do."""
    mla_decode.check(absorb(q.nope, k_up), q.rope, cache.latent)


def _decode(
    q: Queries,
    k_up: Float[Array, "N h C"],
    v_up: Float[Array, "N v C"],
    cache: LayerCache,
    view: PagedView,
    scale: float,
) -> Float[Array, "B W N v"]:
    """``attend`` in the absorbed form by the kernel, which reads the pages where they are."""
    mixed = mla_decode.mla_decode(
        absorb(q.nope, k_up),
        q.rope,
        cache.latent,
        view.page_table,
        view.visible,
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
        whole, rows, k_up, v_up, view.visible, scale=scale, implementation="mosaic_gpu"
    )


def write(
    pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"], mesh: Mesh | None
) -> Tree:
    """``write_rows`` on a mesh: each device its own slots."""
    paged, per_slot = partition("pages"), partition("slots")
    with jax.named_scope("cache_write"):
        run = sharded(write_rows, mesh, (paged, per_slot, per_slot, per_slot), paged)
        return run(pages, rows, page_table, written)
