"""Every stage in plain XLA, as the papers write it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.top_k.reference import top_k
from mtp_jax.model import indexer, mla
from mtp_jax.model.backend import selection
from mtp_jax.model.backend.attention import attention_of
from mtp_jax.model.backend.xla_experts import Rows, Stream, XlaExperts
from mtp_jax.model.cache import (
    Cache,
    Entries,
    LayerCache,
    PagedView,
    Tree,
    Views,
    WholeCache,
    places,
    read_chosen,
    read_rows,
)
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import Choice, IndexQueries
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.mla import Form, Queries
from mtp_jax.model.narrow import Bf16, ByHead, Table, expand
from mtp_jax.model.params import Attention, Grouped, Layer, Params
from mtp_jax.model.parts import join, split_tree
from mtp_jax.model.sharding import constrain, partition, sharded, ways
from mtp_jax.model.stack import parts, stacked


@dataclass(frozen=True)
class Xla(XlaExperts):
    """See the package. Hashable, as programs are compiled for one.

    Attributes:
        form: MLA form of a pass without a cache; a view of a cache has its own.
    """

    form: Form = "naive"

    # Stages

    def before_attention(
        self,
        p: Layer,
        cfg: ModelConfig,
        x: Stream,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Stream, Any, Entries | None, Cache | None]:
        """Norm, queries, entries to cache, by a kind of ``attention``.

        Returns (x, queries, entries, cache). There are no entries where they have been written already.
        """
        a, normed = p.attention, rms_norm(x, p.attention_norm, cfg.rms_norm_eps)
        q = attention_of(a).queries(self, a, cfg, normed, angles)
        return x, q, self.entries(a, cfg, normed, angles), cache

    def attend(
        self,
        a: Attention | Grouped,
        cfg: ModelConfig,
        q: Any,
        entries: Entries | None,
        cache: Cache | None,
        views: Views,
        choice: Choice = (),
    ) -> tuple[Float[Array, "B W N v"], Cache | None, Choice]:
        """Write the entries, attend over visible rows. Without a cache every token sees the tokens before it.

        choice: rows for sparse attention, if another layer has chosen them; else this one's
        indexer chooses. Returns (context, cache, choice).

        A token's view of its own window comes from the cache as well, so that an FP8 cache gives the same
        result for any set of tokens computed together. With a mesh each device handles its own slots
        (``data``) and heads (``model``); the cache is replicated over ``model``, because all heads share it.
        """
        if not isinstance(cache, LayerCache):
            assert entries is not None, "entries have nowhere to be but here"
            kind, rows = attention_of(a), entries.rows
            mask = jnp.tri(rows.shape[1], dtype=bool)
            if isinstance(cache, WholeCache):
                cache = cache.extended(rows)
                rows, mask = cache.rows, cache.mask
            mask = jnp.broadcast_to(mask, (rows.shape[0], *mask.shape))
            chosen = choice[0] if choice else selection.of_whole(q.index, entries.index, mask, cfg)
            if chosen is not None:
                mask &= indexer.chosen_mask(chosen, mask.shape[-1])
            context = kind.over_rows(self, cfg, q, kind.by_head(self, a, cfg), rows, mask)
            return context, cache, (chosen,)
        shapes, contexts, choices = [v.written.shape for v in views], [], []
        parts = (split_tree(x, shapes, self.mesh) for x in (q, entries))
        given = zip(views, *parts, choice or (None,) * len(views), strict=True)
        # No part writes rows that another one sees.
        for view, asked, own, chosen in given:
            context, cache, chosen = self._attend_part(a, cfg, asked, own, cache, view, chosen, bool(choice))
            contexts.append(context)
            choices.append(chosen)
        return join(contexts, self.mesh), cache, tuple(choices)

    def repeated(
        self,
        first: int,
        last: int,
        wanted: Int[Array, ""] | int,
        one: Callable[[Any, Any], Any],
        carry: Any,
    ) -> Any:
        """``one(i, carry)`` for i from ``first`` to ``last - 1``; from ``wanted`` on it means nothing."""
        if self.loops and first < last:
            return jax.lax.fori_loop(first, wanted, one, carry)
        for i in range(first, last):
            carry = one(i, carry)
        return carry

    def after_attention(
        self, p: Layer, cfg: ModelConfig, x: Stream, context: Float[Array, "B W N v"], views: Views
    ) -> Stream:
        """The output projection (eq. 19)."""
        o = p.attention.o.reshape(cfg.hidden_size, -1)
        out = self.linear(context.reshape(*context.shape[:2], -1), o, split="in")
        return constrain(x + constrain(out, self.mesh, "slots", None, None), self.mesh, "slots", None, None)

    def finish(self, x: Stream, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm behind the last block."""
        return rms_norm(x, weight, eps)

    # Parts that stages are made of

    @jax.named_scope("head")
    def head(self, hidden: Float[Array, "... D"], table: Table) -> Float[Array, "... V"]:
        """Logits in float32, from rows in the table's dtype."""
        rows = hidden.astype(jnp.float32 if isinstance(table, Bf16) else table.dtype)
        return self.product(rows, table, jnp.float32)

    def arranged(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """The layers in groups, each of which a program runs in a loop if it has more than one."""
        return [[layer] for layer in layers]

    def laid_out(self, params: Params) -> Params:
        """Parameters on their devices in memory as programs read them best, still layer by layer.

        If nothing else holds them, only one weight is in memory twice at a time.
        """
        groups = self.arranged(params.layers)
        if len(groups) == len(params.layers):
            return params
        params = replace(params, layers=())
        layers = (parts(stacked(own, consume=True)) if len(own) > 1 else own for own in groups)
        return replace(params, layers=tuple(itertools.chain.from_iterable(layers)))

    @property
    def loops(self) -> bool:
        """Whether passes alike are a loop, as long as wanted, or unrolled: graphs of launches have none."""
        return False

    @property
    def head_parts(self) -> int:
        """Parts of the vocabulary that greedy decoding looks at one after the other.

        All logits would be a step's largest array, unless devices share them; a quarter of them takes less
        memory than a layer's experts need.
        """
        return 4 if ways("vocab", self.mesh) == 1 else 1

    def entries(
        self, a: Attention | Grouped, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]
    ) -> Entries:
        """Entries that rows add to the cache."""
        return attention_of(a).entries(self, a, cfg, x, angles)

    def by_head(self, w: ByHead) -> ByHead:
        """Matrices of heads as attention multiplies them."""
        return expand(w, jnp.float32)

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The MLA form for chunks of ``window`` tokens."""
        return "naive"

    def attend_rows(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
        rows: Float[Array, "B L c"],
        mask: Bool[Array, "B W L"],
        scale: float,
        form: Form,
    ) -> Float[Array, "B W N v"]:
        """Attention over rows at hand."""
        return mla.attend(q, k_up, v_up, rows, mask, scale, form)

    def write(
        self, pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]
    ) -> Tree:
        """A tree of ``pages`` [P, S, c] with the rows [B, W, c] written; in place when donated.

        Rows that are not to be written (negative numbers) go to the last page, which no sequence owns; so do
        rows past the table, which an executable deeper than its slots ask for has.
        """
        paged, per_slot = partition("pages"), partition("slots")
        with jax.named_scope("cache_write"):
            run = sharded(self.write_rows, self.mesh, (paged, per_slot, per_slot, per_slot), paged)
            return run(pages, rows, page_table, written)

    def write_rows(
        self, pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]
    ) -> Tree:
        """``write`` on one device."""
        count, size = jax.tree.leaves(pages)[0].shape[:2]
        page, offset, _ = places(count, size, page_table, written)

        def scatter(pages: Array, rows: Array) -> Array:
            rows = rows.reshape(-1, rows.shape[-1])
            return pages.at[page, offset].set(rows, mode="promise_in_bounds")

        return jax.tree.map(scatter, pages, rows)

    # Attention, part by part

    def _attend_part(
        self,
        a: Attention | Grouped,
        cfg: ModelConfig,
        q: Any,
        entries: Entries | None,
        cache: LayerCache,
        view: PagedView,
        chosen: Int[Array, "B W K"] | None,
        chose: bool,
    ) -> tuple[Float[Array, "B W N v"], LayerCache, Int[Array, "B W K"] | None]:
        """chose: whether another layer did; this one's indexer has nothing to choose then."""
        index, topk = None if chose else q.index, cfg.indexer.topk if cfg.indexer else 0
        kind = attention_of(a)

        def local(q, index, by_head, entries, cache, view, chosen):
            with jax.named_scope("cache_write"):
                if entries is not None:
                    given = cache.stored(entries, cfg.row)
                    cache = self.write_rows(cache, given, view.page_table, view.written)
            with jax.named_scope("attend"):
                if index is not None:
                    chosen = self.choose(index, cache, view, topk)
                return kind.over_pages(self, cfg, q, by_head, cache, view, chosen), cache, chosen

        heads, per_slot = partition("slots", None, "heads", None), partition("slots")
        own, paged = partition("heads"), partition("pages")
        given = heads, per_slot, own, per_slot, paged, per_slot, per_slot
        run = sharded(local, self.mesh, given, (heads, paged, per_slot))
        return run(replace(q, index=None), index, kind.by_head(self, a, cfg), entries, cache, view, chosen)

    def choose(
        self, q: IndexQueries, cache: LayerCache, view: PagedView, topk: int
    ) -> Int[Array, "B W K"] | None:
        """The rows that each window token attends to, in order, on one device; NOTHING where it sees fewer.

        None: all that it sees, of which there cannot be more.
        """
        if view.page_table.shape[1] * cache.page_size <= topk:
            return None
        with jax.named_scope("index"):
            return self.best(self.index_scores(q, cache, view), topk)

    def index_scores(self, q: IndexQueries, cache: LayerCache, view: PagedView) -> Float[Array, "B W L"]:
        """Scores of cached rows, -inf for rows that a token does not see; none is NaN."""
        return selection.scores(q, cache, view)

    def best(self, found: Float[Array, "B W L"], count: int) -> Int[Array, "B W K"]:
        """The entries with the best of these scores."""
        return top_k(found, count)

    def attend_chosen(
        self,
        q: Queries,
        k_up: Any,  # ByHead
        v_up: Any,
        cache: LayerCache,
        view: PagedView,
        scale: float,
        chosen: Int[Array, "B W K"] | None,
    ) -> Float[Array, "B W N v"]:
        """Attention over the rows that tokens chose, on one device; None: over all that they see."""
        if chosen is None:
            return self.attend_pages(q, k_up, v_up, cache, view, scale)
        if not selection.gathers(view, cache, chosen):
            only = indexer.chosen_mask(chosen, view.page_table.shape[1] * cache.page_size)
            return self.attend_pages(q, k_up, v_up, cache, view, scale, only)
        rows = read_chosen(cache, view.page_table, chosen, q.nope.dtype, k_up.shape[-1])
        there, each = chosen != indexer.NOTHING, jax.tree.map(mla.alone, replace(q, index=None))
        out = self.attend_own(each, k_up, v_up, mla.alone(rows)[:, 0], mla.alone(there)[:, 0], scale)
        return out.reshape(*chosen.shape[:2], *out.shape[2:])

    def attend_own(
        self,
        q: Queries,
        k_up: Any,  # ByHead
        v_up: Any,
        rows: Float[Array, "T K c"],
        there: Bool[Array, "T K"],
        scale: float,
    ) -> Float[Array, "T one N v"]:
        """Attention of single tokens, each over rows of its own. Rows that are not there come first."""
        return self.attend_rows(q, k_up, v_up, rows, there[:, None], scale, "absorbed")

    def attend_pages(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
        cache: LayerCache,
        view: PagedView,
        scale: float,
        only: Bool[Array, "B W L"] | None = None,
    ) -> Float[Array, "B W N v"]:
        """Attention over the cached rows that a view sees, or ``only`` some of them, on one device."""
        seen = view.visible.seen(view.page_table.shape[1] * cache.page_size)
        found = read_rows(cache, view.page_table, seen, v_up.dtype, k_up.shape[-1])
        mask = view.visible.mask(q.rope.shape[1], found.shape[1])
        mask = mask if only is None else mask & only
        return self.attend_rows(q, k_up, v_up, found, mask, scale, view.form)
