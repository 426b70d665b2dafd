"""MLA by kernels on a Hopper GPU, sparse or not (docs/kernels.md)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.index_scores import api as index_scores
from kernels_pallas.mla_absorb import api as mla_absorb
from kernels_pallas.mla_decode import api as mla_decode
from kernels_pallas.mla_low_rank import api as mla_low_rank
from kernels_pallas.mla_prefill import api as mla_prefill
from kernels_pallas.mla_values import api as mla_values
from kernels_pallas.quantised import quantise, whole_tiles
from kernels_pallas.top_k import api as top_k
from mtp_jax.model.attention.kind import Context
from mtp_jax.model.attention.latent import Latent
from mtp_jax.model.attention.source import Chosen, Paged, Source, Whole
from mtp_jax.model.attention_config import Reach
from mtp_jax.model.cache import Cache, Entries, LayerCache, PagedView, Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.mla import LOW_RANK_EPS, Queries, Ups, queries, rows_of
from mtp_jax.model.params import Attention
from mtp_jax.model.products import e4m3
from mtp_jax.model.products.e4m3 import HopperRows
from mtp_jax.model.products.hopper import HopperProducts
from mtp_jax.model.products.plain import Reader, Readers
from mtp_jax.model.products.stream import Parts, ProductResult, parts, summed
from mtp_jax.model.sharding import partition, sharded, ways
from mtp_jax.model.visible import Window


@dataclass(frozen=True)
class HopperLatent(Latent):
    """MLA whose queries, cache writes, attention and choice of rows are kernels, where shapes allow."""

    on: HopperProducts

    def reach(self, cfg: ModelConfig) -> Reach:
        """``MlaConfig.kernel_reach`` where kernels take the shapes."""
        shape, dtype = (1, 1, cfg.num_attention_heads), jnp.bfloat16
        q, rope = (jax.ShapeDtypeStruct((*shape, n), dtype) for n in (cfg.kv_lora_rank, cfg.qk_rope_head_dim))
        pages = jax.ShapeDtypeStruct((1, cfg.usual_page, cfg.row.width), dtype)
        if not self.on.can("mla_decode", mla_decode.check, q, rope, pages):
            return "table"
        return cfg.attention.kernel_reach

    def readers(self, a: Attention) -> Readers:
        """The projections to low ranks as readers; a layer with an indexer reads plain rows."""
        if a.indexer is not None:
            return ()
        return Reader(a.q_b, "out") if a.q_a is None else Reader(a.q_a), Reader(a.kv_a)

    def project(
        self,
        a: Attention,
        cfg: ModelConfig,
        x: Any,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Queries, Entries | None, Cache | None]:
        """One kernel for the two norms of low ranks, rope and cache writes, unless there is an indexer.

        A step of few tokens has one for all between the queries' product and absorbed attention, too.
        """
        if a.indexer is not None:
            return super().project(a, cfg, x, angles, cache, views)
        on = self.on
        reader = Reader(a.q_b, "out")
        *low_rank, kv = on.results(x, *(w for w in (a.q_a, a.kv_a) if w is not None))
        q = next(iter(low_rank), None)
        # A launch writes the rows of one part.
        one = len(views) == 1 and views[0].packing is None and on.takes(reader, e4m3.dtype_of(x))
        left = None if q is None else (parts(q, on.mesh), parts(kv, on.mesh))
        if one and left and isinstance(cache, LayerCache) and self._norms_low_rank(*left, a, cache):
            low, entries, cache = self._low_rank(a, cfg, left, angles, cache, views[0])
        else:
            low = x if q is None else on.norm(q, a.q_norm, LOW_RANK_EPS, (reader,))[1]
            entries = Entries(rows_of(summed(kv), a, cfg, angles))
        absorbed = one and views[0].form == "absorbed"
        if absorbed and self._absorbs(a, cfg, x.shape):
            q = self._inward(low, a, cfg, angles)
        else:
            q = queries(on.linear(low, a.q_b, split="out"), cfg, angles)
        return replace(q, rows=self._rows(a, cfg, x.shape) if absorbed else None), entries, cache

    def contexts(self, q: Queries) -> Any:
        """Specs of an array split by heads, or of rows in e4m3."""
        return super().contexts(q) if q.rows is None else HopperRows(q.rows, None, e4m3.of_rows("heads"))

    def attend(self, q: Queries, w: Ups, source: Source, scale: float) -> Context:
        """Attention by kernels where they can. Results of few tokens are handed over quantised, by a kernel
        where it reads attention's own results."""
        # Rows that tokens chose are attended to apart, and come together afterwards.
        asked = replace(q, rows=None) if isinstance(source, Chosen) else q
        found = self._attended(asked, w, source, scale)
        if q.rows is None or isinstance(found, HopperRows):
            return found
        rows = quantise(found.reshape(-1, math.prod(found.shape[2:])))
        return HopperRows(q.rows, None, rows.padded(whole_tiles(rows.shape[0])))

    def _attended(self, q: Queries, w: Ups, source: Source, scale: float) -> Context:
        """Absorbed attention by a kernel that reads pages in place; naive by a kernel that expands rows."""
        if isinstance(source, Paged) and source.only is not None:
            self.on.do_without("mla_prefill", "a choice among rows that tokens share, as in sparse prefill,")
        elif isinstance(source, Paged) and source.form == "naive":
            whole, heads_last = jnp.concatenate([q.nope, q.rope], axis=-1), w.v.swapaxes(1, 2)
            if self.on.runs("mla_prefill", mla_prefill.check, whole, q.nope, q.rope, heads_last):
                read, size, count = source.blocks(mla_prefill.BLOCK, q.nope.dtype)
                rows = mla_prefill.Blocks(lambda i: read(i)[0], size, count)
                return mla_prefill.mla_prefill(
                    whole, rows, w.k, w.v, source.view.visible, scale=scale, implementation="mosaic_gpu"
                )
        elif isinstance(source, Paged):
            view = source.view
            where = source.cache.rows, view.page_table, view.visible
            if (context := self._decoded(q, w, where, scale)) is not None:
                return context
        elif isinstance(source, Chosen):
            where = _as_pages(source.read(q.nope.dtype))
            if (context := self._decoded(source.apart(q), w, where, scale)) is not None:
                return source.together(context)
        return super().attend(q, w, source, scale)

    def scores(self, q: IndexQueries, source: Whole | Paged) -> Float[Array, "B W L"]:
        """Scores by a kernel that reads the pages where they are."""
        keys = source.cache.index if isinstance(source, Paged) else None
        if keys is None or not self.on.can("index_scores", index_scores.check, q.q, keys):
            return super().scores(q, source)
        assert isinstance(source, Paged)
        view = source.view
        return index_scores.index_scores(
            q.q, q.weights, keys, view.page_table, view.visible, implementation="mosaic_gpu"
        )

    def best(self, found: Float[Array, "B W L"], count: int) -> Int[Array, "B W K"]:
        """The chosen rows, by a kernel that does not sort."""
        flat = found.reshape(-1, found.shape[-1])
        if not self.on.can("top_k", top_k.check, flat):
            return super().best(found, count)
        chosen = top_k.top_k(flat, count, implementation="mosaic_gpu")
        return chosen.reshape(*found.shape[:2], count)

    def result(self, a: Any, cfg: ModelConfig, context: Context, absorbed: bool) -> ProductResult:
        """The output projection, of rows as attention hands them over."""
        if not isinstance(context, HopperRows):
            return super().result(a, cfg, context, absorbed)
        return self.on.result(context, a.o.reshape(cfg.hidden_size, -1), split="in")

    def _decoded(self, q: Queries, w: Ups, where: tuple[Any, Array, Window], scale: float) -> Context | None:
        """Absorbed attention over the visible rows of pages, by their table; None where no kernel does it."""
        pages, table, visible = where
        inward = jnp.einsum("bwnh,nhc->bwnc", q.nope, w.k) if q.inward is None else q.inward
        if not self.on.runs("mla_decode", mla_decode.check, inward, q.rope, pages):
            return None
        asked = inward, q.rope, pages, table, visible
        options: Any = {"scale": scale, "in_place": True, "implementation": "mosaic_gpu"}
        if q.rows is None:
            return jnp.einsum("bwnc,nvc->bwnv", mla_decode.mla_decode(*asked, **options), w.v)
        mixed, window = mla_decode.mla_decode_parts(asked, **options), inward.shape[1]
        return HopperRows(
            q.rows, None, mla_values.mla_values(mixed, w.v, window=window, implementation="mosaic_gpu")
        )

    def _absorbs(self, a: Attention, cfg: ModelConfig, shape: tuple[int, ...]) -> bool:
        width, mesh = math.prod(a.q_b.shape[:-1]), self.on.mesh
        q = e4m3.part(jax.ShapeDtypeStruct((*shape[:2], width), jnp.bfloat16), mesh, "slots", None, "heads")
        k_up = e4m3.part(self.by_head(a, cfg).k, mesh, "heads")
        return self.on.can("mla_absorb", mla_absorb.check, q, k_up)

    def _rows(self, a: Attention, cfg: ModelConfig, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """``Queries.rows`` of rows of this shape."""
        mesh, v_up, o = self.on.mesh, self.by_head(a, cfg).v, a.o.reshape(cfg.hidden_size, -1)
        tokens, (slots, window) = math.prod(shape[:2]) // ways("slots", mesh), shape[:2]
        taken = self.on.takes(Reader(o, "in"), jnp.bfloat16)
        if taken and self.on.can("mla_values", mla_values.check, tokens, e4m3.part(v_up, mesh, "heads")):
            return slots, window, math.prod(v_up.shape[:2])
        return None

    def _inward(self, x: Any, a: Attention, cfg: ModelConfig, angles: Float[Array, "B W 2 r"]) -> Queries:
        """Queries of few tokens, taken into the latent space by the kernel that rotates them."""
        q = self.on.result(x, a.q_b, split="out")

        def local(q, k_up, cos, sin):
            kernel = partial(mla_absorb.mla_absorb, interleaved=cfg.rope_interleave)
            return kernel(q, k_up, (cos, sin), implementation="mosaic_gpu")

        slots, heads = partition("slots"), partition("slots", None, "heads")
        specs = partition(None, "slots", "heads"), partition("heads"), slots, slots
        run = sharded(local, self.on.mesh, specs, (heads, heads))
        cos_sin = angles[..., 0, :], angles[..., 1, :]
        inward, rope = run(parts(q, self.on.mesh).values, self.by_head(a, cfg).k, *cos_sin)
        # Attention without a kernel reads ``nope``; else nothing does, and the compiler leaves it out.
        nope = queries(summed(q).reshape(*q.shape[:2], *a.q_b.shape[:-1]), cfg, angles).nope
        return Queries(nope, rope, inward)

    def _norms_low_rank(self, q: Parts, kv: Parts, a: Attention, cache: LayerCache) -> bool:
        pages = None if cache.fp8 else cache.rows
        given = q.values, kv.values, a.kv_norm, pages
        return self.on.can("mla_low_rank", mla_low_rank.check, *given)

    def _low_rank(
        self,
        a: Attention,
        cfg: ModelConfig,
        left: tuple[Parts, Parts],
        angles: Float[Array, "B W 2 r"],
        cache: LayerCache,
        view: PagedView,
    ) -> tuple[HopperRows, Entries | None, LayerCache]:
        """Queries' low rank normed and quantised, and the window's rows written.

        left: results of the projections of queries and of latents. Rows for an FP8 cache are returned, not
        written.
        """
        (q, kv), fp8 = left, cache.fp8

        def local(q, kv, q_norm, kv_norm, angles, pages, view):
            kernel = partial(mla_low_rank.mla_low_rank, eps=LOW_RANK_EPS, interleaved=cfg.rope_interleave)
            where = view.page_table, view.written
            return kernel(q, kv, q_norm, kv_norm, angles, pages, *where, implementation="mosaic_gpu")

        slots, weight, parts = partition("slots"), partition(), partition(None, "slots")
        specs = (parts, parts, weight, weight, slots, partition("pages"), slots)
        run = sharded(local, self.on.mesh, specs, (e4m3.of_rows(), slots if fp8 else partition("pages")))
        with jax.named_scope("cache_write"):
            cos_sin = angles[..., 0, :], angles[..., 1, :]
            low, out = run(
                q.values, kv.values, a.q_norm, a.kv_norm, cos_sin, None if fp8 else cache.rows, view
            )
        rows = HopperRows(q.shape, None, low)
        return (rows, Entries(out), cache) if fp8 else (rows, None, LayerCache(out))


def _as_pages(source: Whole) -> tuple[Float[Array, "P S c"], Int[Array, "T n"], Window]:
    """The chosen rows of each token as pages of its own, and their visibility: rows NOTHING come first."""
    tokens, count, width = source.rows.shape
    pages = source.rows.reshape(-1, math.gcd(count, mla_decode.PAGE), width)
    table = jnp.arange(len(pages), dtype=jnp.int32).reshape(tokens, -1)
    there = source.mask.sum(axis=(1, 2), dtype=jnp.int32)
    return pages, table, Window(count - there, jnp.full_like(there, count), jnp.minimum(there, 1))
