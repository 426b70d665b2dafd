"""Stages whose products, experts and attention kernels compute on a Hopper GPU (docs/kernels.md).

Products with FP8 weights take their rows in e4m3. A norm, or the kernel that joins the heads' results,
quantises rows once for all products that read them. A product may leave float32 parts that the next norm
sums. Both are private to this backend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.fp8_matmul import api as fp8_matmul
from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.mla_low_rank import api as mla_low_rank
from kernels_pallas.quantised import Quantised
from kernels_pallas.rms_norm import api as norms
from kernels_pallas.router import api as router
from kernels_pallas.router.rule import Rule
from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import e4m3
from mtp_jax.model.backend.e4m3 import Rows
from mtp_jax.model.backend.mosaic_attention import MosaicAttention, can
from mtp_jax.model.backend.stream import Stream, plus, stream, summed
from mtp_jax.model.backend.xla_experts import Split
from mtp_jax.model.cache import Cache, Entries, LayerCache, PagedView, Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.mla import LOW_RANK_EPS, queries, rows_of
from mtp_jax.model.moe import Routing, Weight
from mtp_jax.model.narrow import Fp8
from mtp_jax.model.params import Attention, Grouped, Layer, Mlp, Moe
from mtp_jax.model.sharding import constrain, partition, sharded, ways


@dataclass(frozen=True)
class MosaicGpu(MosaicAttention):
    """See the package.

    Attributes:
        kernels: parts that kernels compute, where they can. "linear": products with FP8 weights; "experts":
            routed experts; "attention": attention over the paged cache, ``mla_decode`` in the absorbed form,
            ``mla_prefill`` in the naive, ``mla_low_rank``, which writes the cache, where the queries' product
            takes e4m3, and ``index_scores`` and ``top_k``, which choose rows for sparse attention.
        strict: whether it is a ConfigError if they cannot.
    """

    def __post_init__(self) -> None:
        if self.experts == "dense" and "experts" in self.kernels:
            raise ConfigError("experts = 'dense' has no kernel; use 'sparse', or leave experts to XLA")

    # Stages

    def before_attention(
        self,
        p: Layer,
        cfg: ModelConfig,
        x: Any,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Any, Any, Entries | None, Cache | None]:
        """One launch for MLA's two norms of low ranks, rope and the cache, unless a layer has an indexer.

        Raises ConfigError where kernels must attend and attention is not MLA: there are none.
        """
        a, (x, added) = p.attention, stream(x)
        if isinstance(a, Grouped):
            self._do_without("grouped-query attention")
        if isinstance(a, Grouped) or a.indexer is not None:
            return super().before_attention(p, cfg, plus(summed(x), added), angles, cache, views)
        first = a.q_b if a.q_a is None else a.q_a
        readers = self.multiplies(first, x.dtype, "out" if a.q_a is None else None)
        x, normed = self._norm(
            x, p.attention_norm, cfg.rms_norm_eps, (readers, self.multiplies(a.kv_a, x.dtype)), added
        )
        q = None if a.q_a is None else self._linear(normed, a.q_a, summed=False)
        kv, rows = self._linear(normed, a.kv_a, summed=False), None
        reader = self.multiplies(a.q_b, x.dtype, "out")
        # One launch writes one part.
        one = q is not None and isinstance(cache, LayerCache) and len(views) == 1 and reader
        if one and self._norms_low_rank(q, kv, a, cache):
            low, rows, cache = self._low_rank(q, kv, a, cfg, angles, cache, views[0])
        else:
            low = normed if q is None else self._norm(q, a.q_norm, LOW_RANK_EPS, (reader,))[1]
            rows = Entries(rows_of(summed(kv), a, cfg, angles))
        q = self._linear(low, a.q_b, split="out")
        return Stream(x, ()), queries(q, cfg, angles), rows, cache

    def after_attention(
        self, p: Layer, cfg: ModelConfig, x: Any, context: Float[Array, "B W N v"], views: Views
    ) -> Any:
        """The result is left to the next norm to add, and perhaps to sum."""
        o = p.attention.o.reshape(cfg.hidden_size, -1)
        # Absorbed, they come out of a product that leaves them head by head, which spares a transpose.
        heads_first = all(v.form == "absorbed" for v in views) if views else self.form == "absorbed"
        flat = self._heads_as_rows(context, self.multiplies(o, context.dtype, "in"), heads_first)
        out = self._linear(flat, o, split="in", summed=False)
        parts = (None,) * (out.ndim - 3)
        return Stream(stream(x).x, (constrain(out, self.mesh, *parts, "slots", None, None),))

    def feed_forward(
        self, p: Layer, cfg: ModelConfig, x: Any, counts: Bool[Array, "B W"] | None
    ) -> tuple[Any, Routing | None]:
        """The result is left to the next norm to add."""
        x, added = stream(x)
        if isinstance(p.mlp, Moe):
            readers = [False, self._takes_experts(p.mlp, x.dtype)]
            readers += [] if p.mlp.shared is None else [self._takes_mlp(p.mlp.shared, x.dtype)]
        else:
            readers = [self._takes_mlp(p.mlp, x.dtype)]
        x, normed = self._norm(x, p.mlp_norm, cfg.rms_norm_eps, readers, added)
        added, routing = self._fed(p, cfg, normed, counts)
        return Stream(constrain(x, self.mesh, "slots", None, None), added), routing

    def finish(self, x: Any, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm at the end, of the stream with everything left to be added."""
        return rms_norm(plus(*stream(x)), weight, eps)

    # Rows

    def _norm(
        self,
        x: Float[Array, "*s B W D"],
        weight: Float[Array, " D"],
        eps: float,
        readers: Sequence[bool],
        added: Sequence[Float[Array, "*t B W D"]] = (),
    ) -> tuple[Float[Array, "*u B W D"], Rows]:
        """The sum of x and its addends, and the sum normalised; if nothing is added, x as it came.

        readers: for each product that reads the result, whether it takes it quantised.
        """
        shape = x.shape[-3:]
        if not any(readers) or not all(can(norms.check, a.shape[-1], a.dtype) for a in (x, *added)):
            total = plus(summed(x), added)
            return total, Rows(shape, rms_norm(total, weight, eps), None)
        also_plain = not all(readers)

        def local(weight, *given):
            normed = norms.rms_norm(
                [a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in given],
                weight,
                eps,
                total=bool(added),
                plain=also_plain,
                implementation="mosaic_gpu",
            )
            rows: Any = normed.quantised
            own = given[0].shape[-3:]
            whole = [a.reshape(own) for a in (normed.total, normed.plain) if a is not None]
            return whole, (rows.values, rows.scale)

        slots = partition("slots")
        given = [partition(None, "slots") if a.ndim == 4 else slots for a in (x, *added)]
        out = [slots] * (bool(added) + also_plain), e4m3.of_rows()
        with jax.named_scope("norm"):
            whole, rows = sharded(local, self.mesh, (partition(), *given), out)(weight, x, *added)
        return whole[0] if added else x, Rows(shape, whole[-1] if also_plain else None, Quantised(*rows))

    def _heads_as_rows(self, x: Float[Array, "B W N v"], quantised: bool, heads_first: bool) -> Any:
        """Heads side by side, [B, W, N * v], as the product that reads them takes them."""
        wide = (*x.shape[:2], x.shape[2] * x.shape[3])
        own = e4m3.part(x, self.mesh, "slots", None, "heads")
        if not quantised or not can(norms.check_blocks, *own.shape[2:], x.dtype):
            return x.reshape(wide)

        def local(x):
            rows = x.reshape(-1, *x.shape[2:])
            given = rows.swapaxes(0, 1) if heads_first else rows
            rows = norms.quantise(given, blocks_first=heads_first, implementation="mosaic_gpu")
            return rows.values, rows.scale

        rows = sharded(local, self.mesh, (partition("slots", None, "heads"),), e4m3.of_rows("heads"))(x)
        return Rows(wide, None, Quantised(*rows))

    def plain(self, x: Any) -> Float[Array, "B W D"]:
        """Rows of a product that does not take them quantised."""
        return e4m3.plain(x)

    # Products

    def multiplies(self, w: Any, dtype: Any, split: Split | None = None) -> bool:
        """Whether a kernel multiplies with this weight, its rows in e4m3."""
        if not isinstance(w, Fp8):
            return False
        values = e4m3.part(w.values, self.mesh, *e4m3.axes_of(w, split))
        matrix = jax.ShapeDtypeStruct((math.prod(values.shape[:-1]), values.shape[-1]), values.dtype)
        return self._runs("linear", fp8_matmul.check, jax.ShapeDtypeStruct((1, 1), dtype), matrix, 64)

    def linear(self, x: Any, w: Any, *, split: Split | None = None) -> Float[Array, "..."]:
        """A product with an FP8 weight by a kernel; rows are in e4m3 with 1x128 blocks, or become so."""
        return self._linear(x, w, split=split)

    def _linear(self, x: Any, w: Any, *, split: Split | None = None, summed: bool = True) -> Any:
        """summed False: where the kernel leaves float32 parts to be summed, [s, B, W, *o] as they are."""
        if not self.multiplies(w, e4m3.dtype_of(x), split):
            return super().linear(e4m3.plain(x), w, split=split)
        axes = e4m3.axes_of(w, split)
        given, of_x = e4m3.operand(x, axes[-1])
        (slots, width), mesh = x.shape[:2], self.mesh

        def local(x, w):
            matrix = w.values.reshape(-1, w.shape[-1])
            y = fp8_matmul.fp8_matmul(
                e4m3.flat(x), matrix, w.scale, summed=not parts, implementation="mosaic_gpu"
            )
            y = y[..., :rows, :].reshape(*y.shape[:-2], -1, width, *w.shape[:-1])
            return jax.lax.psum(y, "model") if over_model else y

        rows, over_model = slots * width // ways("slots", mesh), split == "in" and ways("heads", mesh) > 1
        *columns, terms = e4m3.part(w.values, mesh, *axes).shape
        parts = not (summed or over_model) and fp8_matmul.parts(rows, math.prod(columns), terms) > 1
        specs = Fp8(partition(*axes), partition(axes[0], axes[-1]))
        out = partition(*(None,) * parts, "slots", None, axes[0])
        return sharded(local, mesh, (of_x, specs), out)(given, w)

    def _takes_mlp(self, p: Mlp, dtype: Any) -> bool:
        """Whether kernels compute an MLP, its rows in e4m3."""
        if not (isinstance(p.gate_up, Fp8) and isinstance(p.down, Fp8)):
            return False
        x = jax.ShapeDtypeStruct((1, 1), dtype)
        parts = (e4m3.part(w.values, self.mesh, None, "mlp") for w in (p.gate_up, p.down))
        return all(self._runs("linear", fp8_matmul.check, x, part, fp8_matmul.BLOCK) for part in parts)

    def mlp(self, x: Any, p: Mlp) -> Float[Array, "B W D"]:
        """A dense MLP by two kernels."""
        if not self._takes_mlp(p, e4m3.dtype_of(x)):
            return super().mlp(e4m3.plain(x), p)
        given, of_x = e4m3.operand(x)
        (slots, *wide), mesh = x.shape, self.mesh

        def local(x, gate_up, down):
            weights = gate_up.values, down.values, gate_up.scale, down.scale
            y = fp8_matmul.fp8_mlp(e4m3.flat(x), *weights, implementation="mosaic_gpu")
            y = y[:rows].reshape(-1, *wide)
            return y if mesh is None else jax.lax.psum(y, "model")

        rows = slots * wide[0] // ways("slots", mesh)
        width = partition(None, "mlp")
        return sharded(local, mesh, (of_x, width, width), partition("slots"))(given, p.gate_up, p.down)

    # Experts

    def runs_experts(self, x: Any, gate_up: Weight, down: Weight) -> bool:
        """Whether kernels compute a device's routed experts, of weights [E, 2, I, D] and [E, D, I].

        Raises ConfigError if they must and cannot.
        """
        return self._runs("experts", e4m3.check_experts, x, gate_up, down)

    def _takes_experts(self, p: Moe, dtype: Any) -> bool:
        """Whether they take their rows in e4m3."""
        x = jax.ShapeDtypeStruct((1, 1), dtype)
        return (
            isinstance(p.gate_up, Fp8) and isinstance(p.down, Fp8) and self.runs_experts(x, p.gate_up, p.down)
        )

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
    ) -> Routing:
        """The choice by a kernel that also counts the choices of each expert."""
        if "experts" not in self.kernels or not router.can_choose(logits.shape[1], rule):
            return super().choose_experts(logits, bias, rule, counted)
        choice = router.choose(logits, bias, rule, counted, implementation="mosaic_gpu")
        return Routing(choice.ids, choice.weights, choice.counts)

    def routed(
        self,
        gate_up: Weight,
        down: Weight,
        x: Any,
        r: Routing,
        shards: int = 1,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "T D"]:
        """Routed experts by kernels. There may be more quantised rows than the routing has."""
        if not isinstance(x, Quantised) and not self.runs_experts(x, gate_up, down):
            return super().routed(gate_up, down, x, r, shards, first)
        (first_layer, first_scale), (second_layer, second_scale) = e4m3.arrays(gate_up), e4m3.arrays(down)
        return grouped_matmul.expert_mlp(
            x,
            r.ids,
            r.weights,
            first_layer,
            second_layer,
            first_scale,
            second_scale,
            counts=r.counts,
            first=first,
            rows_per_expert=-(-r.ids.size // (down.shape[0] * shards)),
            implementation="mosaic_gpu",
        )

    def operand(self, p: Moe, x: Any) -> tuple[Any, Any]:
        """Quantised if the experts take them so."""
        whole = e4m3.plain(x)
        return e4m3.operand(x if self._takes_experts(p, whole.dtype) else whole)

    def flat_rows(self, given: Any) -> Any:
        """A device's part of an operand."""
        return e4m3.flat(given)

    def gathered(self, given: Any, count: int) -> Any:
        """Gather rows. Scales are gathered device by device: a tiled gather needs them transposed."""
        x = e4m3.flat(given)
        if not isinstance(x, Quantised):
            return super().gathered(given, count)
        values, scale = (
            jax.lax.all_gather(a, "data", tiled=tiled)
            for a, tiled in ((x.values[:count], True), (x.scale[:, :count], False))
        )
        scale = scale.swapaxes(0, 1)
        return Quantised(values, scale.reshape(scale.shape[0], -1))

    def rows_first(self, rows: Any, count: int) -> Any:
        """Values, and scales transposed."""
        if not isinstance(rows, Quantised):
            return super().rows_first(rows, count)
        return rows.values[:count], rows.scale[:, :count].T

    def from_rows_first(self, tree: Any) -> Any:
        """Rows with scales transposed back."""
        return Quantised(tree[0], tree[1].T) if isinstance(tree, tuple) else tree

    # Attention

    def _norms_low_rank(self, q: Any, kv: Any, a: Attention, cache: Any) -> bool:
        pages = None if cache.fp8 else cache.rows
        return "attention" in self.kernels and can(mla_low_rank.check, q, kv, a.kv_norm, pages)

    def _low_rank(
        self,
        q: Any,
        kv: Any,
        a: Attention,
        cfg: ModelConfig,
        angles: Float[Array, "B W 2 r"],
        cache: Any,
        view: PagedView,
    ) -> tuple[Rows, Entries | None, LayerCache]:
        """Queries' low rank normed and quantised, and the window's rows written.

        q, kv: [*s, B, W, K] as their products leave them. Rows for an FP8 cache are returned, not written.
        """
        fp8 = cache.fp8

        def local(q, kv, q_norm, kv_norm, angles, pages, view):
            where = (pages, view.page_table, view.written)
            options: dict[str, Any] = {"eps": LOW_RANK_EPS, "interleaved": cfg.rope_interleave}
            low, out = mla_low_rank.mla_low_rank(
                q, kv, q_norm, kv_norm, angles, *where, **options, implementation="mosaic_gpu"
            )
            return (low.values, low.scale), out

        slots, weight = partition("slots"), partition()
        parts = (partition(None, "slots") if x.ndim == 4 else slots for x in (q, kv))
        specs = (*parts, weight, weight, slots, partition("pages"), slots)
        run = sharded(local, self.mesh, specs, (e4m3.of_rows(), slots if fp8 else partition("pages")))
        with jax.named_scope("cache_write"):
            cos_sin = angles[..., 0, :], angles[..., 1, :]
            low, out = run(q, kv, a.q_norm, a.kv_norm, cos_sin, None if fp8 else cache.rows, view)
        rows = Rows(q.shape[-3:], None, Quantised(*low))
        return (rows, Entries(out), cache) if fp8 else (rows, None, LayerCache(out))
