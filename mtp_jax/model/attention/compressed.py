"""Window and compressed attention of DeepSeek-V4.

A token has one row, which is the key and the value of every head, with rope on its last channels; the output
is rotated back. Every head has a sink, a score without a value. A token attends to the rows of the last
tokens, and to entries (``compressor``): at ratio 4 to the entries that an indexer chooses, at 128 to all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model import compressor, indexer
from mtp_jax.model.attention.kind import Asked, Attended, Kind
from mtp_jax.model.attention.place import EntryPlace, PagedPlace, WholePlace
from mtp_jax.model.attention.source import scores_of_pages
from mtp_jax.model.cache import (
    Cache,
    Entries,
    LayerCache,
    PagedView,
    Views,
    WindowCache,
    WindowPages,
    WindowSlots,
    contained,
    read_chosen,
    read_rows,
    rows_at,
    widened,
    zeroed,
)
from mtp_jax.model.compressor import Span
from mtp_jax.model.config import CompressedConfig, ModelConfig
from mtp_jax.model.indexer import NOTHING, IndexQueries
from mtp_jax.model.layers import rms_norm, rotate_last, unrotate_last
from mtp_jax.model.params import CompressedAttention, Compressor
from mtp_jax.model.products.plain import Reader, Readers, Rows
from mtp_jax.model.recent import Recent, ring
from mtp_jax.model.sharding import partition

if TYPE_CHECKING:  # it imports the kernels, which a CPU has no use for
    from mtp_jax.model.products.hopper import HopperProducts


@struct.dataclass
class Queries:
    """Queries of all heads, normed head by head and rotated; of the indexer where the layer has one."""

    whole: Float[Array, "B W N h"]
    index: IndexQueries | None = None


@struct.dataclass
class Added(Entries):
    """Rows of tokens, normed and rotated, and further values of the tokens that attention reads.

    Attributes:
        inputs: the layer's compressors read them, float32, see ``compressor.inputs``; None without.
        angles: rope's, by which the output is rotated back.
    """

    inputs: Any = None
    angles: Any = None


@struct.dataclass
class Own:
    """Parameters of a layer that attention itself reads.

    Attributes:
        sink: each head's.
        compressors: the layer's, without their products: one makes entries, and one index keys.
    """

    sink: Float[Array, " N"]
    compressors: tuple[Compressor, ...]

    @property
    def ratio(self) -> int:
        """Tokens of an entry; 0 without entries."""
        return len(self.compressors[0].places) if self.compressors else 0


Far = tuple[Float[Array, "_B ... _h"], Bool[Array, "_B _b _K"]]
"""Entries of a block of tokens, [B, L, h] or of each token [B, b, K, h], and the entries that tokens see."""

FarOf = Callable[[Callable[[Array], Array]], Far]
"""The entries of a block of tokens, from a function that cuts arrays [B, W, ...] to the block."""


@dataclass(frozen=True)
class Compressed(Kind):
    """Window and compressed attention in plain XLA."""

    def cache(self, rows: LayerCache, cfg: ModelConfig, layer: int, slots: int, widest: int) -> WindowCache:
        """See ``Kind.cache``. Raises ConfigError for pages that a window spans more than two of."""
        c, count, size = _of(cfg), len(jax.tree.leaves(rows.rows)[0]), rows.page_size
        if size < c.window:
            raise ConfigError(f"page_size = {size}; expected sliding_window = {c.window} or more")
        dtype = None if rows.fp8 else jax.tree.leaves(rows.rows)[0].dtype
        near, ratio = zeroed(count, c.window, cfg.row, None, dtype).rows, c.ratio(layer)
        recent = ring(near, slots, c.window - 1, widest)
        if not ratio:
            return WindowCache(WindowPages(near, None, None), WindowSlots(recent, None), size)
        over, index = c.overlap(ratio), c.index_width(layer) or None
        channels = 2 * (c.head_dim + (index or 0))
        first = jnp.zeros((count, over, channels), jnp.float32) if over else None
        inputs = jnp.zeros((slots, 0, channels * (2 if over else 1)), jnp.float32)
        inputs = ring(inputs, slots, compressor.reach(ratio), widest)
        entries = zeroed(count, size // ratio, cfg.row, index, dtype)
        return WindowCache(WindowPages(near, first, entries), WindowSlots(recent, inputs), size)

    def readers(self, a: CompressedAttention) -> Readers:
        """The projections of queries and rows; compressors, and an indexer's weights, read plain rows."""
        return Reader(a.q_a), Reader(a.kv), *(() if a.compressor is None else (None,))

    def queries(
        self, a: CompressedAttention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W two 2 r"]
    ) -> Queries:
        """Projected by way of a low rank; a head's query is normed without a weight."""
        on, c, eps = self.on, _of(cfg), cfg.rms_norm_eps
        own = _angles(a, angles)
        readers = [Reader(a.q_b, "out"), *(Reader(i.q) for i in (a.indexer,) if i)]
        low = on.norm(on.result(x, a.q_a), a.q_norm, eps, readers)[1]
        heads = on.linear(low, a.q_b, split="out")
        q = rotate_last(rms_norm(heads, jnp.ones(c.head_dim), eps), own)
        if a.indexer is None:
            return Queries(q)
        with jax.named_scope("index"):
            weights = on.exactly(x, a.indexer.weights) * (c.index_dim * c.index_heads) ** -0.5
            return Queries(q, IndexQueries(rotate_last(on.linear(low, a.indexer.q), own), weights))

    def entries(
        self, a: CompressedAttention, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W two 2 r"]
    ) -> Added:
        """The row of each token, and its inputs to compressors."""
        own = _angles(a, angles)
        rows = rotate_last(rms_norm(self.on.linear(x, a.kv), a.kv_norm, cfg.rms_norm_eps), own)
        made = _compressors(a)
        outputs = [(self.on.exactly(x, p.rows), self.on.exactly(x, p.gates)) for p in made]
        inputs = compressor.inputs(made, outputs) if made else None
        return Added(rows, inputs=inputs, angles=own)

    def by_head(self, a: CompressedAttention, cfg: ModelConfig) -> Own:
        """Sinks, and the parameters of compressors beside their products."""
        return Own(a.sink, tuple(replace(p, rows=None, gates=None) for p in _compressors(a)))

    def spread(self, w: Own) -> Own:
        """Sinks are split as heads are."""
        return Own(partition("heads"), jax.tree.map(lambda _: PartitionSpec(), w.compressors))  # pyright: ignore

    def over(self, cfg: ModelConfig, asked: Asked, w: Own, place: EntryPlace) -> Attended:
        """Attend to rows of the window's tokens, and to entries beside them."""
        if isinstance(place, WholePlace):
            return *self._over_sequences(cfg, asked, w, place), None
        if place.view.block:
            return self._over_block(cfg, asked, w, place), None, place.cache
        return self._over_pages(cfg, asked, w, place)

    def _over_pages(self, cfg: ModelConfig, asked: Asked, w: Own, place: PagedPlace) -> Attended:
        """Write rows and entries, then attend to the window and to entries."""
        cache, view = place.cache, place.view
        span, added, c = Span.of(view.written), asked.entries, _of(cfg)
        at = span.start[:, None] - (c.window - 1) + jnp.arange(c.window - 1 + span.width)
        seen = (at >= view.visible.first[:, None]) & (at < (span.start + span.count)[:, None])
        far, chosen = None, None
        with jax.named_scope("cache_write"):
            if isinstance(cache, WindowCache):
                near, cache = self._extended(cfg, added, w, place)
            else:
                cache = place.write(cache, cache.stored(added, cfg.row), view.page_table, view.written)
                near = rows_at(cache.rows, view.page_table, jnp.where(seen, at, -1))
        with jax.named_scope("attend"):
            near = jnp.where(seen[..., None], widened(near, cfg.row, added.rows.dtype), 0)
            if isinstance(cache, WindowCache) and cache.pages.entries is not None:
                far, chosen = self._far_in_pages(cfg, asked, cache.pages.entries, w.ratio, view)
            context = _mixed(cfg, asked.q.whole, w.sink, near, seen, span, far)
            return unrotate_last(context, added.angles), chosen, cache

    def _over_block(
        self, cfg: ModelConfig, asked: Asked, w: Own, place: PagedPlace
    ) -> Float[Array, "B W N h"]:
        """Attend to the window's last cached rows, the same for all tokens, and to all tokens of a block."""
        cache, view = place.cache, place.view
        own, window, live = asked.entries, _of(cfg).window, (view.written >= 0)[:, :, None]
        with jax.named_scope("attend"):
            at = view.visible.length[:, None] - window + jnp.arange(window)
            seen = at >= view.visible.first[:, None]
            rows = rows_at(cache.rows, view.page_table, jnp.where(seen, at, -1))
            near = jnp.where(seen[..., None], widened(rows, cfg.row, own.rows.dtype), 0)
            parts = [(near, live & seen[:, None]), (own.rows, live)]
            return unrotate_last(_softmax(asked.q.whole, w.sink, parts, cfg.softmax_scale), own.angles)

    def _over_sequences(
        self, cfg: ModelConfig, asked: Asked, w: Own, place: WholePlace
    ) -> tuple[Float[Array, "B W N h"], Int[Array, "B W K"] | None]:
        """Attend to the window and to entries of whole sequences."""
        assert place.cache is None, "nothing is trained through compressed attention"
        added, c = asked.entries, _of(cfg)
        slots, width, _ = added.rows.shape
        zero = jnp.zeros(slots, jnp.int32)
        span = Span(zero, zero + width, width)
        with jax.named_scope("attend"):
            near = jnp.pad(contained(added.rows, cfg.row.keys), ((0, 0), (c.window - 1, 0), (0, 0)))
            there = jnp.broadcast_to(jnp.arange(near.shape[1]) >= c.window - 1, near.shape[:2])
            far: FarOf | None = None
            chosen = None
            if w.ratio:
                before = jnp.zeros((slots, compressor.reach(w.ratio), added.inputs.shape[-1]))
                made = compressor.entries_of(
                    before, added.inputs, span, w.compressors, cfg, w.ratio, added.rows.dtype
                )
                rows, visible = contained(made[0], cfg.row.keys), span.seen(w.ratio, made[0].shape[1])
                if asked.index is not None and rows.shape[1] > c.topk:
                    scores = indexer.masked(indexer.scores(asked.index, made[1]), visible)
                    chosen = indexer.best(scores, c.topk)
                    visible = indexer.chosen_mask(chosen, rows.shape[1])
                far = partial(_shared, rows, visible)
            context = _mixed(cfg, asked.q.whole, w.sink, near, there, span, far)
            return unrotate_last(context, added.angles), chosen

    def result(
        self, a: CompressedAttention, cfg: ModelConfig, context: Float[Array, "B W N h"], absorbed: bool
    ) -> Float[Array, "B W D"]:
        """Each group of heads projected down, then all of them together."""
        groups = a.o_a.shape[0]
        parts = context.reshape(*context.shape[:2], groups, -1)
        low = self.on.by_group(parts, a.o_a)
        flat = low.reshape(*context.shape[:2], -1)
        return self.on.linear(flat, a.o.reshape(cfg.hidden_size, -1), split="in")

    def _extended(self, cfg: ModelConfig, added: Added, w: Own, place: PagedPlace) -> tuple[Any, WindowCache]:
        """The cached rows of the window before a span and of the span, and the cache with its values."""
        cache, view, write = place.cache, place.view, place.write
        assert view.slot is not None, "values of recent tokens belong to slots"
        table, span, pages = view.page_table, Span.of(view.written), cache.pages
        slot, dtype, entries = view.slot, added.rows.dtype, pages.entries
        if self.on.mesh is not None:
            slot = slot - jax.lax.axis_index("data") * len(jax.tree.leaves(cache.slots)[0])
        rows = Recent(cache.slots.rows, pages.rows, cache.page_size)
        stored = LayerCache(pages.rows).stored(added, cfg.row).rows
        before = rows.before(span, _of(cfg).window - 1, table, slot)
        near = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, stored)
        rows, inputs = rows.extended(stored, span, table, slot, write), None
        if entries is not None:
            inputs = Recent(cache.slots.inputs, pages.inputs, cache.page_size)
            earlier = inputs.before(span, compressor.reach(w.ratio), table, slot)
            made = compressor.entries_of(earlier, added.inputs, span, w.compressors, cfg, w.ratio, dtype)
            new = entries.stored(Entries(made[0], made[1] if len(made) > 1 else None), cfg.row)
            entries = write(entries, new, table, span.ended(w.ratio))
            inputs = inputs.extended(added.inputs, span, table, slot, write)
        own = WindowSlots(rows.slots, inputs and inputs.slots)
        return near, WindowCache(
            WindowPages(rows.pages, inputs and inputs.pages, entries), own, cache.page_size
        )

    def _far_in_pages(
        self, cfg: ModelConfig, asked: Asked, entries: LayerCache, ratio: int, view: PagedView
    ) -> tuple[FarOf, Int[Array, "B W K"] | None]:
        """The entries that tokens attend to, and the indexer's choice where it chose."""
        c, row, table, span = _of(cfg), cfg.row, view.page_table, Span.of(view.written)
        length, dtype = table.shape[1] * entries.page_size, asked.entries.rows.dtype
        visible = span.seen(ratio, length)
        if asked.index is not None and length > c.topk:
            with jax.named_scope("index"):
                ended = jnp.max((span.start + span.count) // ratio)
                found = scores_of_pages(asked.index, entries, table, visible, ended)
                chosen = indexer.best(found, c.topk)

            def one_by_one(cut: Callable[[Array], Array]) -> Far:
                own = cut(chosen)
                return read_chosen(entries, table, own, dtype, row.e4m3, row.block), own != NOTHING

            return one_by_one, chosen
        rows = read_rows(entries, table, visible.any(axis=1), dtype, row.e4m3, row.block)
        return partial(_shared, rows, visible), None


@dataclass(frozen=True)
class HopperCompressed(Compressed):
    """Window and compressed attention in plain XLA. Raises ConfigError where kernels are required."""

    on: "HopperProducts"

    def project(
        self,
        a: CompressedAttention,
        cfg: ModelConfig,
        x: Rows,
        angles: Float[Array, "B W two 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Queries, Any, Cache | None]:
        """Queries, rows and the cache. Raises ConfigError where kernels are required."""
        self.on.do_without("mla_decode", "compressed attention")
        return super().project(a, cfg, x, angles, cache, views)


def _of(cfg: ModelConfig) -> CompressedConfig:
    assert cfg.compressed is not None, "a layer with compressed attention has a configuration of it"
    return cfg.compressed


def _angles(a: CompressedAttention, angles: Float[Array, "B W two 2 r"]) -> Float[Array, "B W 2 r"]:
    """The angles of this kind of layer."""
    return angles[:, :, 0 if a.compressor is None else 1]


def _compressors(a: CompressedAttention) -> tuple[Compressor, ...]:
    """A layer's compressors: of entries, and of index keys."""
    of_keys = None if a.indexer is None else a.indexer.compressor
    return tuple(p for p in (a.compressor, of_keys) if p is not None)


def _shared(rows: Float[Array, "B L h"], visible: Bool[Array, "B W L"], cut: Callable[[Array], Array]) -> Far:
    """Entries that are read for all tokens of a slot, and the mask of a block of tokens."""
    return rows, cut(visible)


def _mixed(
    cfg: ModelConfig,
    q: Float[Array, "B W N h"],
    sink: Float[Array, " N"],
    near: Float[Array, "B L h"],
    there: Bool[Array, "B L"],
    span: Span,
    far: FarOf | None,
) -> Float[Array, "B W N h"]:
    """Attention over the window and entries, block by block of tokens, so that memory is a block's.

    near: the rows of the ``window - 1`` tokens before the span, and its own. there: the rows that are seen.
    """
    window, width = _of(cfg).window, q.shape[1]
    block = min(width, window)
    blocks = -(-width // block)

    def padded(a: Array) -> Array:
        return jnp.pad(a, ((0, 0), (0, blocks * block - width), *((0, 0),) * (a.ndim - 2)))

    asked, rows, exist = padded(q), padded(near), padded(there)
    reach = block + window - 1
    token, row = jnp.arange(block)[:, None], jnp.arange(reach)
    within = (row >= token) & (row < token + window)

    def one(i: Int[Array, ""] | int) -> Float[Array, "B b N h"]:
        def cut(a: Array, size: int = block) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, i * block, size, axis=1)

        inside = i * block + jnp.arange(block) < span.count[:, None]
        mask = within & cut(exist, reach)[:, None] & inside[..., None]
        parts = [(cut(rows, reach), mask)]
        if far is not None:
            parts.append(far(lambda a: cut(padded(a))))
        return _softmax(cut(asked), sink, parts, cfg.softmax_scale)

    if blocks == 1:
        return one(0)
    found = jax.lax.map(one, jnp.arange(blocks))
    return jnp.moveaxis(found, 0, 1).reshape(len(q), -1, *q.shape[2:])[:, :width]


def _softmax(
    q: Float[Array, "B b N h"], sink: Float[Array, " N"], parts: list[Far], scale: float
) -> Float[Array, "B b N h"]:
    """Attention over all parts' rows together, softmax in float32; each row is key and value.

    A row that is not finite gives NaN to the tokens that see it, and nothing to other tokens.
    """
    scores, values = [], []
    for rows, mask in parts:
        letters = "bkh" if rows.ndim == 3 else "bwkh"
        found = jnp.einsum(f"bwnh,{letters}->bnwk", q, rows, preferred_element_type=jnp.float32) * scale
        scores.append(jnp.where(mask[:, None], found, -jnp.inf))
        values.append((letters, jnp.where(jnp.isfinite(rows), rows, 0)))
    top = [s.max(axis=-1, keepdims=True) for s in scores]
    peak = jnp.broadcast_to(sink[:, None, None], top[0].shape)
    for each in top:
        peak = jnp.maximum(peak, each)
    weights = [jnp.exp(s - peak) for s in scores]
    total = jnp.exp(sink[:, None, None] - peak) + sum(w.sum(axis=-1, keepdims=True) for w in weights)
    mixed = [
        jnp.einsum(f"bnwk,{letters}->bwnh", (w / total).astype(q.dtype), rows)
        for w, (letters, rows) in zip(weights, values, strict=True)
    ]
    return sum(mixed[1:], mixed[0])
