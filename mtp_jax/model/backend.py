"""Backends, which compute a forward pass stage by stage; the mathematics does not depend on them.

    before_attention  norm, projections, rope, index queries      -> queries, entries to cache
    attend            write them, choose, attend over the cache   -> context, choice
    after_attention   output projection, added to the stream
    feed_forward      norm; router, routed and shared experts, or a dense MLP, added to the stream
    tap               the stream, for a drafter that reads it
    finish            the norm at the end

A backend is composed of products, a kind of attention for each kind of layer, and experts, all for one
device. ``xla`` has the parts as the papers write them, and is the oracle of the other backends: ``xla_cpu``
has other forms of parts that are slow in XLA on a CPU, ``mosaic_gpu`` has kernels on a Hopper GPU. The values
between the stages of one backend, the residual stream and the rows of a product, are its own business.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
from flax.core import FrozenDict
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import FORMS, KERNELS, measured
from mtp_jax.errors import ConfigError
from mtp_jax.model import hyper
from mtp_jax.model.attention.compressed import Compressed, HopperCompressed
from mtp_jax.model.attention.cpu import CpuLatent
from mtp_jax.model.attention.cpu_gqa import CpuGqa
from mtp_jax.model.attention.gqa import Gqa, HopperGqa
from mtp_jax.model.attention.kind import Asked, Context, Kind
from mtp_jax.model.attention.latent import Latent
from mtp_jax.model.attention.pages import Write, by_loop, by_scatter
from mtp_jax.model.attention.place import PagedPlace, WholePlace
from mtp_jax.model.attention_config import AttentionConfig
from mtp_jax.model.cache import (
    Cache,
    Entries,
    LayerCache,
    Tree,
    Views,
    WindowCache,
    rows_at,
)
from mtp_jax.model.choices import ExchangeChoice, KernelChoice
from mtp_jax.model.compressed_config import CompressedConfig
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import is_hopper, multiplies_bf16, platform
from mtp_jax.model.experts.cpu import CpuExperts
from mtp_jax.model.experts.exchange import Exchange, exchange_of
from mtp_jax.model.experts.plain import Experts
from mtp_jax.model.gqa_config import GqaConfig
from mtp_jax.model.indexer import Choice
from mtp_jax.model.mla import Form
from mtp_jax.model.mla_config import MlaConfig
from mtp_jax.model.moe import Routing, Way
from mtp_jax.model.params import (
    Hyper,
    HyperHead,
    Layer,
    Mlp,
    Params,
)
from mtp_jax.model.parts import join, split_tree
from mtp_jax.model.products.cpu import CpuProducts
from mtp_jax.model.products.plain import Products, Readers, Residual, Rows
from mtp_jax.model.products.stream import ProductResult
from mtp_jax.model.sharding import constrain, data_size, partition, sharded, with_auto_axes
from mtp_jax.model.sight import Sight
from mtp_jax.model.stack import alike, parts, stacked

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Backend:
    """The parts that carry out a pass, and its stages. Hashable, as programs are compiled for one.

    Attributes:
        products: the products and the residual stream.
        kinds: the kinds of attention, by their configurations.
        experts: the second half of an MoE block.
        write_rows: writes rows into pages, on one device.
        micro_batches: number of micro-batches of a pass where its slots allow it, 1 or 2.
    """

    products: Products
    kinds: Mapping[type[AttentionConfig], Kind]
    experts: Experts
    write_rows: Write = by_scatter
    micro_batches: int = 1

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices; None for one device."""
        return self.products.mesh

    def kind(self, cfg: ModelConfig) -> Kind:
        """The kind of attention of a model's layers, or of a head's."""
        return self.kinds[type(cfg.attention)]

    # Stages

    def before_attention(
        self,
        p: Layer,
        cfg: ModelConfig,
        x: Residual,
        sight: Sight,
        cache: Cache | None,
        rows: Rows | None = None,
    ) -> tuple[Residual, Any, Entries | None, Cache | None]:
        """Norm, queries, entries to cache, by the layer's kind of attention.

        rows: to be projected; None: x, normed. Returns (x, queries, entries, cache). There are no entries
        where they have been written already.
        """
        a, kind = p.attention, self.kind(cfg)
        if rows is None:
            readers = kind.readers(a)
            x, rows = self.entered(x, p.attention_norm, p.attention_hyper, cfg, readers)
        return x, *kind.project(a, cfg, rows, sight.angles, cache, sight.views)

    def attend(
        self,
        a: Any,
        cfg: ModelConfig,
        q: Any,
        entries: Entries | None,
        cache: Cache | None,
        sight: Sight,
    ) -> tuple[Context, Cache | None, Choice]:
        """Write the entries, attend over visible rows. Without a cache every token sees the tokens before it.

        A layer's indexer chooses rows where no other layer has. Returns (context, cache, choice).

        A token's view of its own window comes from the cache as well, so that an FP8 cache gives the same
        result for any set of tokens computed together. With a mesh each device handles its own slots
        (``data``) and heads (``model``); the cache is replicated over ``model``, because all heads share it.
        """
        kind, views, choice = self.kind(cfg), sight.views, sight.choice
        asked, w = Asked(replace(q, index=None), None if choice else q.index, entries), kind.by_head(a, cfg)
        if not isinstance(cache, LayerCache | WindowCache):
            given = replace(asked, chosen=choice[0] if choice else None)
            context, chosen, cache = kind.over(cfg, given, w, WholePlace(cache, kind.form))
            return context, cache, (chosen,)
        per_slot: Any = partition("slots")
        heads, paged = partition("slots", None, "heads", None), partition("pages")
        specs = Asked(heads, per_slot, per_slot, per_slot), kind.spread(w)
        place = PagedPlace(paged, per_slot, cfg.row, self.write_rows)
        run = sharded(
            partial(kind.over, cfg), self.mesh, (*specs, place), (kind.contexts(q), per_slot, paged)
        )
        shapes, contexts, choices = [v.shape for v in views], [], []
        asking = [v.unpacked(a) for v, a in zip(views, split_tree(asked, shapes, self.mesh), strict=True)]
        if len(asking) > 1 and isinstance(cache, LayerCache):
            # No part writes rows that another part sees. Rows that are written while another part may still
            # read would cost a copy of all pages.
            for view, part in zip(views, asking, strict=True):
                if part.entries is not None:
                    rows = cache.stored(part.entries, cfg.row)
                    cache = self.write(cache, rows, view.page_table, view.written)
            asking = [replace(part, entries=None) for part in asking]
        for view, part, chosen in zip(views, asking, choice or (None,) * len(views), strict=True):
            own = replace(part, chosen=chosen)
            place = replace(place, cache=cache, view=replace(view, packing=None))
            context, chosen, cache = run(own, w, place)
            contexts.append(view.packed(context))
            choices.append(chosen)
        context = join(contexts, self.mesh) if len(contexts) > 1 else contexts[0]
        return context, cache, tuple(choices)

    def after_attention(
        self, p: Layer, cfg: ModelConfig, x: Residual, context: Context, views: Views
    ) -> Residual:
        """The output projection, added to the stream."""
        kind = self.kind(cfg)
        absorbed = all(v.form == "absorbed" for v in views) if views else kind.form == "absorbed"
        out = kind.result(p.attention, cfg, context, absorbed)
        out = constrain(out, self.mesh, "slots", None, None) if isinstance(out, jax.Array) else out
        return self.left(x, out)

    def feed_forward(
        self,
        p: Layer,
        cfg: ModelConfig,
        x: Residual,
        counts: Bool[Array, "B W"] | None,
        tokens: Int[Array, "B W"] | None = None,
    ) -> tuple[Residual, Routing | None]:
        """A dense MLP, or the router and its experts. Returns (x, routing of an MoE block).

        counts: which rows count; other rows visit no routed expert. None: all rows count. tokens: of the
        rows, where tokens choose experts.
        """
        mlp = p.mlp
        # The router reads plain rows.
        readers: Readers = (mlp,) if isinstance(mlp, Mlp) else (None, mlp, mlp.shared)
        x, normed = self.entered(x, p.mlp_norm, p.mlp_hyper, cfg, readers)
        if isinstance(mlp, Mlp):
            with jax.named_scope("mlp"):
                return self.left(x, self.products.mlp(normed, mlp)), None
        added, routing = self.experts.moe(mlp, cfg, normed, counts, tokens)
        return self.left(x, *added), routing

    def entered(
        self,
        x: Residual,
        weight: Float[Array, " D"],
        p: Hyper | None,
        cfg: ModelConfig,
        readers: Readers = (),
    ) -> tuple[Residual, Rows]:
        """The input of a sublayer: the stream, or the gated sum of several. Returns (stream, normed rows)."""
        if p is None:
            return self.products.norm(x, weight, cfg.rms_norm_eps, readers)
        return self.products.enter(x, p, cfg, weight, readers)

    def left(self, x: Residual, *outs: ProductResult) -> Residual:
        """The stream with a sublayer's result added, or each of several streams."""
        if not isinstance(x, hyper.Entered):
            return self.products.add(x, *outs)
        return self.products.leave(x, *outs)

    def streams(self, x: Residual) -> Residual:
        """Several streams between two blocks as an array [B, W, S, D]; one stream as it is."""
        return self.products.streams(x)

    def tap(self, x: Residual) -> Float[Array, "B W D"]:
        """The residual stream between two blocks; the mean of several."""
        x = self.streams(x)
        return x.mean(axis=2).astype(x.dtype) if hyper.several(x) else self.products.tap(x)

    def collapsed(self, x: Residual, p: HyperHead | None, cfg: ModelConfig) -> Residual:
        """The one stream behind the last block."""
        return x if p is None else self.products.collapse(self.streams(x), p, cfg)

    def finish(self, x: Residual, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm behind the last block."""
        return self.products.finish(x, weight, eps)

    # The cache, and passes alike

    def write(
        self, pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]
    ) -> Tree:
        """``write_rows`` on every device."""
        paged, per_slot = partition("pages"), partition("slots")
        with jax.named_scope("cache_write"):
            run = sharded(self.write_rows, self.mesh, (paged, per_slot, per_slot, per_slot), paged)
            return run(pages, rows, page_table, written)

    def move(
        self, pages: Tree, page_table: Int[Array, "B n"], source: Int[Array, "B W"], target: Int[Array, "B W"]
    ) -> Tree:
        """A tree of pages [P, S, c] in which each slot's rows ``source`` are its rows ``target``, too.

        All are read before one is written. Negative targets are not written.
        """

        def local(pages: Tree, table: Array, source: Array, target: Array) -> Tree:
            return self.write_rows(pages, rows_at(pages, table, source), table, target)

        paged, per_slot = partition("pages"), partition("slots")
        with jax.named_scope("cache_move"):
            run = sharded(local, self.mesh, (paged, per_slot, per_slot, per_slot), paged)
            return run(pages, page_table, source, target)

    def repeated(
        self,
        first: int,
        last: int,
        wanted: Int[Array, ""] | int,
        one: Callable[[Any, Carry], Carry],
        carry: Carry,
    ) -> Carry:
        """``one(i, carry)`` for i from ``first`` to ``last - 1``; no effect from ``wanted`` on."""
        if self.products.loops and first < last:
            return jax.lax.fori_loop(first, wanted, one, carry)
        for i in range(first, last):
            carry = one(i, carry)
        return carry

    # Layers in memory

    def arranged(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """The layers in groups, each of which a program runs in a loop if it has more than one."""
        if all(map(self.products.reads_stacks, layers)):
            return alike(layers)
        return [[layer] for layer in layers]

    def laid_out(self, params: Params) -> Params:
        """Parameters on their devices in memory as programs read them best, still layer by layer.

        If the caller keeps no reference, only one weight is in memory twice at a time.
        """
        groups = self.arranged(params.layers)
        if len(groups) == len(params.layers):
            return params
        params = replace(params, layers=())
        layers = (parts(stacked(own, consume=True)) if len(own) > 1 else own for own in groups)
        return replace(params, layers=tuple(itertools.chain.from_iterable(layers)))


def kinds(latent: Latent, gqa: Gqa, compressed: Compressed) -> Mapping[type[AttentionConfig], Kind]:
    """The kinds of attention of a backend, by their configurations."""
    return FrozenDict({MlaConfig: latent, GqaConfig: gqa, CompressedConfig: compressed})


def xla(
    mesh: Mesh | None = None,
    *,
    form: Form = "naive",
    experts: Way = "sparse",
    exchange: Exchange | None = None,
    micro_batches: int = 1,
) -> Backend:
    """Every part in plain XLA: the reference."""
    on = Products(mesh)
    own = Experts(on, experts, exchange)
    parts = kinds(Latent(on, form), Gqa(on), Compressed(on))
    return Backend(on, parts, own, micro_batches=micro_batches)


def xla_cpu(
    mesh: Mesh | None = None,
    *,
    form: Form = "naive",
    experts: Way = "sparse",
    exchange: Exchange | None = None,
    micro_batches: int = 1,
    matrices: bool = False,
) -> Backend:
    """Parts in forms that are fast in XLA on a CPU (docs/cpu.md)."""
    on = CpuProducts(mesh, matrices)
    own = CpuExperts(on, experts, exchange)
    return Backend(on, kinds(CpuLatent(on, form), CpuGqa(on), Compressed(on)), own, by_loop, micro_batches)


def mosaic_gpu(
    mesh: Mesh | None = None,
    *,
    form: Form = "naive",
    experts: Way = "sparse",
    exchange: Exchange | None = None,
    micro_batches: int = 1,
    kernels: frozenset[str] = frozenset((*KERNELS, *FORMS)),
    strict: bool = False,
) -> Backend:
    """Kernels on a Hopper GPU (docs/kernels.md); see ``HopperProducts`` for ``kernels`` and ``strict``."""
    # Pallas takes a third of the time that importing this package takes, and a CPU has no use for it.
    from mtp_jax.model.attention.hopper import HopperLatent
    from mtp_jax.model.experts.hopper import HopperExperts
    from mtp_jax.model.products.hopper import HopperProducts

    on = HopperProducts(mesh, kernels, strict)
    own = HopperExperts(on, experts, exchange)
    parts = kinds(HopperLatent(on, form), HopperGqa(on), HopperCompressed(on))
    return Backend(on, parts, own, micro_batches=micro_batches)


def backend(
    kernels: KernelChoice = "auto",
    mesh: Mesh | None = None,
    exchange: ExchangeChoice = "auto",
    room: float = 1.5,
    micro_batches: int = 1,
) -> Backend:
    """The fastest backend for the device, or the backend that ``kernels`` names.

    kernels: "auto": on a Hopper GPU, kernels of which a time on a card is on record, for shapes that they can
    take; "xla": none; "mosaic_gpu": kernels, and a ConfigError for shapes that they cannot take. exchange,
    room: the way of rows to the experts of other devices (see ``exchange.exchange_of``). micro_batches: see
    its module. Raises ConfigError.
    """
    mesh = with_auto_axes(mesh)
    by = exchange_of(exchange, room, mesh)
    if micro_batches > 1 and data_size(mesh) == 1:
        raise ConfigError(
            f"micro_batches = {micro_batches} with one data shard: no rows travel that products could run "
            "beside; give a mesh whose data axis is 2 or more, or micro_batches=1"
        )
    if kernels == "mosaic_gpu" and not is_hopper():
        found = jax.devices()[0].device_kind
        raise ConfigError(
            "kernels = 'mosaic_gpu' needs an NVIDIA GPU of the Hopper generation (H100, H200); found "
            f"{found}; take kernels=auto or kernels=xla"
        )
    if kernels == "mosaic_gpu":
        return mosaic_gpu(mesh, exchange=by, micro_batches=micro_batches, strict=True)
    if kernels == "auto" and is_hopper():
        return mosaic_gpu(mesh, exchange=by, micro_batches=micro_batches, kernels=measured.kernels())
    if platform() == "cpu":
        return xla_cpu(mesh, exchange=by, micro_batches=micro_batches, matrices=multiplies_bf16())
    return xla(mesh, exchange=by, micro_batches=micro_batches)
