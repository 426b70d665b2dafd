"""Every stage in plain XLA, as the papers write it."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.router import reference as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import indexer, mla, moe
from mtp_jax.model.backend import selection
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
from mtp_jax.model.indexer import Choice
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.mla import LOW_RANK_EPS, Form, Queries, queries, rows_of
from mtp_jax.model.moe import Experts, Routing, Weight
from mtp_jax.model.narrow import Narrow, expand
from mtp_jax.model.params import Attention, Layer, Mlp, Moe
from mtp_jax.model.parts import join, split_tree
from mtp_jax.model.sharding import constrain, partition, sharded, ways

Split = Literal["out", "in"]
Stream = Any
"""The residual stream [B, W, D] between two stages: an array at first, then as the backend keeps it."""
Rows = Any
"""What a norm hands to the products that read it: [B, W, D], as the backend keeps it."""


@dataclass(frozen=True)
class Xla:
    """See the package. Hashable, as programs are compiled for one.

    Attributes:
        mesh: of devices; None for one device.
        form: MLA form of a pass without a cache; a view of a cache has its own.
        experts: "dense", which is the reference, or "sparse"; on a mesh they always run in parallel.
    """

    mesh: Mesh | None = None
    form: Form = "naive"
    experts: Experts = "sparse"

    # Stages

    def before_attention(
        self,
        p: Layer,
        cfg: ModelConfig,
        x: Stream,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Stream, Queries, Entries | None, Cache | None]:
        """arXiv 2405.04434, eqs. 9-15. Returns (x, queries, entries, cache).

        There are no entries where they have been written already.
        """
        a, normed = p.attention, rms_norm(x, p.attention_norm, cfg.rms_norm_eps)
        low = normed if a.q_a is None else rms_norm(self.linear(normed, a.q_a), a.q_norm, LOW_RANK_EPS)
        q = queries(self.linear(low, a.q_b, split="out"), cfg, angles)
        if a.indexer is not None and cfg.indexer is not None:
            with jax.named_scope("index"):
                weights = self.exactly(normed, a.indexer.weights)
                index = indexer.queries(self.linear(low, a.indexer.q), weights, cfg.indexer, angles)
            q = replace(q, index=index)
        return x, q, self.entries(a, cfg, normed, angles), cache

    def attend(
        self,
        a: Attention,
        cfg: ModelConfig,
        q: Queries,
        entries: Entries | None,
        cache: Cache | None,
        views: Views,
        choice: Choice = (),
    ) -> tuple[Float[Array, "B W N v"], Cache | None, Choice]:
        """Write the entries, attend over what is visible. Without a cache every token sees those before it.

        choice: what sparse attention looks at of that, if another layer has chosen it; else this one's
        indexer chooses. Returns (context, cache, what was looked at).

        What a token sees of its own window comes from the cache as well, so that an FP8 cache gives the same
        result whatever was computed together. With a mesh each device handles its own slots (``data``) and
        heads (``model``); the cache is replicated over ``model``, because all heads share it.
        """
        if not isinstance(cache, LayerCache):
            assert entries is not None, "entries have nowhere to be but here"
            rows = entries.latent
            mask = jnp.tri(rows.shape[1], dtype=bool)
            if isinstance(cache, WholeCache):
                cache = cache.extended(rows)
                rows, mask = cache.rows, cache.mask
            mask = jnp.broadcast_to(mask, (rows.shape[0], *mask.shape))
            chosen = choice[0] if choice else selection.of_whole(q.index, entries.index, mask, cfg)
            if chosen is not None:
                mask &= indexer.chosen_mask(chosen, mask.shape[-1])
            context = self.attend_rows(q, a.k_up, a.v_up, rows, mask, cfg.softmax_scale, self.form)
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

    def after_attention(
        self, p: Layer, cfg: ModelConfig, x: Stream, context: Float[Array, "B W N v"], views: Views
    ) -> Stream:
        """The output projection (eq. 19)."""
        o = p.attention.o.reshape(cfg.hidden_size, -1)
        out = self.linear(context.reshape(*context.shape[:2], -1), o, split="in")
        return constrain(x + constrain(out, self.mesh, "slots", None, None), self.mesh, "slots", None, None)

    def feed_forward(
        self, p: Layer, cfg: ModelConfig, x: Stream, counts: Bool[Array, "B W"] | None
    ) -> tuple[Stream, Routing | None]:
        """A dense MLP, or the router and its experts. Returns (x, routing of an MoE block).

        counts: rows that do not count visit no routed expert; None: all count.
        """
        normed = rms_norm(x, p.mlp_norm, cfg.rms_norm_eps)
        added, routing = self._fed(p, cfg, normed, counts)
        return constrain(x + functools.reduce(jnp.add, added), self.mesh, "slots", None, None), routing

    def finish(self, x: Stream, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm behind the last block."""
        return rms_norm(x, weight, eps)

    # Parts that stages are made of

    def linear(
        self, x: Rows, w: Float[Array, "*o i"] | Narrow, *, split: Split | None = None
    ) -> Float[Array, "..."]:
        """``x @ w.T``: weights have output features first, as in the checkpoint; narrow ones are expanded.

        split: whether ``model`` splits the first output axis or the input features of w.
        """
        return self.product(x, expand(w, x.dtype), x.dtype)

    def product(self, x: Float[Array, "... i"], w: Float[Array, "*o i"], dtype: Any) -> Float[Array, "..."]:
        """``x @ w.T``, accumulated in float32."""
        flat_x, flat_w = x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1])
        y = jax.lax.dot_general(flat_x, flat_w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return y.reshape(*x.shape[:-1], *w.shape[:-1])

    @jax.named_scope("head")
    def head(self, hidden: Float[Array, "... D"], table: Float[Array, "V D"]) -> Float[Array, "... V"]:
        """Logits in float32, from rows in the table's dtype."""
        return self.product(hidden.astype(table.dtype), table, jnp.float32)

    @property
    def head_parts(self) -> int:
        """Parts of the vocabulary that greedy decoding looks at one after the other.

        All logits would be a step's largest array, unless devices share them; those of a quarter are smaller
        than what a layer's experts need.
        """
        return 4 if ways("vocab", self.mesh) == 1 else 1

    def entries(self, a: Attention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Entries:
        """To cache: the normed latent and the rotated shared key (eqs. 9, 11, 15), and the index key."""
        rows, p = rows_of(self.linear(x, a.kv_a), a, cfg, angles), a.indexer
        if p is None or cfg.indexer is None:
            return Entries(rows)
        with jax.named_scope("index"):
            return Entries(rows, indexer.keys(self.linear(x, p.k), p.k_norm, p.k_bias, cfg.indexer, angles))

    def mlp(self, x: Rows, p: Mlp) -> Float[Array, "B W D"]:
        """``down(silu(gate(x)) * up(x))``."""
        gate_up = self.linear(x, p.gate_up)
        return self.linear(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], p.down)

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

        Rows that are not to be written (negative ones) go to the last page, which no sequence owns; so do
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
        a: Attention,
        cfg: ModelConfig,
        q: Queries,
        entries: Entries | None,
        cache: LayerCache,
        view: PagedView,
        chosen: Int[Array, "B W K"] | None,
        chose: bool,
    ) -> tuple[Float[Array, "B W N v"], LayerCache, Int[Array, "B W K"] | None]:
        """chose: whether another layer did; this one's indexer has nothing to choose then."""
        index, topk = None if chose else q.index, cfg.indexer.topk if cfg.indexer else 0

        def local(q, index, k_up, v_up, entries, cache, view, chosen):
            with jax.named_scope("cache_write"):
                if entries is not None:
                    given = cache.stored(entries, k_up.shape[-1])
                    cache = self.write_rows(cache, given, view.page_table, view.written)
            with jax.named_scope("attend"):
                if index is not None:
                    chosen = selection.choose(index, cache, view, topk)
                context = self.attend_chosen(q, k_up, v_up, cache, view, cfg.softmax_scale, chosen)
                return context, cache, chosen

        heads, per_slot = partition("slots", None, "heads", None), partition("slots")
        up, paged = partition("heads"), partition("pages")
        given = heads, per_slot, up, up, per_slot, paged, per_slot, per_slot
        run = sharded(local, self.mesh, given, (heads, paged, per_slot))
        return run(replace(q, index=None), index, a.k_up, a.v_up, entries, cache, view, chosen)

    def attend_chosen(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
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
        rows = read_chosen(cache, view.page_table, chosen, v_up.dtype, k_up.shape[-1])
        there = (chosen != indexer.NOTHING).reshape(-1, 1, chosen.shape[-1])

        def attend(q: Queries, rows: Float[Array, "BW K c"]) -> Float[Array, "BW one N v"]:
            return self.attend_rows(q, k_up, v_up, rows, there, scale, "absorbed")

        return mla.attend_each(q, rows, attend)

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

    # Experts

    def _fed(
        self, p: Layer, cfg: ModelConfig, x: Rows, counts: Bool[Array, "B W"] | None
    ) -> tuple[tuple[Float[Array, "B W D"], ...], Routing | None]:
        if isinstance(p.mlp, Moe):
            return self.moe(p.mlp, cfg, x, counts)
        with jax.named_scope("mlp"):
            return (self.mlp(x, p.mlp),), None

    def moe(
        self, p: Moe, cfg: ModelConfig, x: Rows, counts: Bool[Array, "B W"] | None = None
    ) -> tuple[tuple[Float[Array, "B W D"], ...], Routing]:
        """Returns (the result of the routed experts and that of the shared expert, to be added; routing)."""
        whole = self.plain(x)
        with jax.named_scope("moe_route"):
            logits = self.exactly(whole, p.router)
        with jax.named_scope("moe_experts"):
            if self.mesh is not None:
                y, r = self._expert_parallel(p, cfg, x, logits, counts)
            else:
                r = self._choose(cfg, p.bias, logits, counts)
                flat = whole.reshape(-1, whole.shape[-1])
                if self.experts == "dense":
                    y = moe.dense(p.gate_up, p.down, flat, r)
                else:
                    y = self.routed(p.gate_up, p.down, self.flat_rows(self.operand(p, x)[0]), r)
        y, r = y.reshape(whole.shape), _shaped(r, whole)
        y = constrain(y, self.mesh, "slots", None, None)
        if p.shared is None:
            return (y,), r
        with jax.named_scope("moe_shared"):
            shared = self.mlp(x, p.shared)
        # Added here, one collective sums both over ``model``.
        return ((y + shared,) if ways("heads", self.mesh) > 1 else (y, shared)), r

    def plain(self, x: Rows) -> Float[Array, "B W D"]:
        """Rows as an array."""
        return x

    def exactly(self, x: Rows, w: Float[Array, "o i"]) -> Float[Array, "*b o"]:
        """A product in float32, also where the device would rather multiply float32 with fewer bits."""
        with jax.default_matmul_precision("highest"):
            return self.product(self.plain(x).astype(jnp.float32), w, jnp.float32)

    def route(self, p: Moe, cfg: ModelConfig, x: Float[Array, "*b D"]) -> Routing:
        """The routing of rows of any shape."""
        return _shaped(self._choose(cfg, p.bias, self.exactly(x, p.router), None), x)

    def _choose(
        self,
        cfg: ModelConfig,
        bias: Float[Array, " E"],
        logits: Float[Array, "... E"],
        counts: Bool[Array, "B W"] | None,
    ) -> Routing:
        """Sigmoid scores; groups, then experts, chosen by corrected score (arXiv 2412.19437, eqs. 12-16)."""
        given = cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group, cfg.norm_topk_prob
        rule = Rule(*given, cfg.routed_scaling_factor)
        with jax.named_scope("moe_route"):
            r = self.choose_experts(logits.reshape(-1, logits.shape[-1]), bias, rule)
            if counts is None or r.counts is not None:
                return r
            return Routing(jnp.where(counts.reshape(-1, 1), r.ids, -1), r.weights)

    def choose_experts(self, logits: Float[Array, "T E"], bias: Float[Array, " E"], rule: Rule) -> Routing:
        """The experts of each row."""
        return Routing(*router.choose(logits, bias, rule))

    def routed(
        self,
        gate_up: Weight,
        down: Weight,
        x: Any,
        r: Routing,
        shards: int = 1,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "T D"]:
        """Only the experts that rows chose.

        x: as ``flat_rows`` gives them. shards: the weights are those of one of so many devices, of experts
        from ``first`` on; the rows and the routing are those of all.
        """
        return moe.grouped(gate_up, down, x, Routing(r.ids - first, r.weights), self.product)

    def operand(self, p: Moe, x: Rows) -> tuple[Any, Any]:
        """Rows as the experts take them, and how a mesh splits them."""
        return x, partition("slots")

    def flat_rows(self, given: Any) -> Any:
        """A device's part of an ``operand``, row by row."""
        return given.reshape(-1, given.shape[-1])

    def gathered(self, given: Any, count: int) -> Any:
        """``flat_rows``, ``count`` of each device, of all devices."""
        return _gathered(self.flat_rows(given))

    def _expert_parallel(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Rows,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Each device's own experts: gather the rows over ``data``, sum the parts over both axes.

        Every device chooses for all rows: that takes less than gathering the choices.
        """
        mesh = self.mesh
        assert mesh is not None, "one device has nothing to gather"

        def local(gate_up, down, bias, x, logits, counts):
            mine, own = jax.lax.axis_index("data") * logits.shape[0], logits.shape[0]
            x, logits = self.gathered(x, math.prod(logits.shape[:2])), _gathered(logits)
            r = self._choose(cfg, bias, logits, None if counts is None else _gathered(counts))
            first = jax.lax.axis_index(("data", "model")) * down.shape[0]
            part = self.routed(gate_up, down, x, r, mesh.size, first)
            part = jax.lax.psum(part.reshape(*logits.shape[:2], -1), "model")
            r = _shaped(r, part)
            chosen = (jax.lax.dynamic_slice_in_dim(a, mine, own) for a in (r.ids, r.weights))
            return jax.lax.psum_scatter(part, "data", tiled=True), *chosen

        given, of_x = self.operand(p, x)
        experts, slots = PartitionSpec(("data", "model")), partition("slots")
        in_specs = (experts, experts, PartitionSpec(), of_x, slots, slots)
        run = sharded(local, mesh, in_specs, (slots, slots, slots))
        y, ids, weights = run(p.gate_up, p.down, p.bias, given, logits, counts)
        return y, Routing(ids, weights)


def _shaped(r: Routing, x: Float[Array, "*b D"]) -> Routing:
    shape = (*x.shape[:-1], r.ids.shape[-1])
    return Routing(r.ids.reshape(shape), r.weights.reshape(shape), r.counts)


def _gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "data", tiled=True)
