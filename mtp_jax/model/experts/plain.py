"""The router and its experts in plain XLA, on one device or in parallel over a mesh."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul.layout import OwnGroups
from kernels_pallas.quantised import Quantised
from kernels_pallas.router import reference as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import moe
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import slots_of
from mtp_jax.model.experts.exchange import Exchange, by_gather
from mtp_jax.model.moe import ExpertWeight, Routing, Way
from mtp_jax.model.params import Moe
from mtp_jax.model.products.e4m3 import Operand
from mtp_jax.model.products.plain import Products, Rows
from mtp_jax.model.products.stream import ProductResult
from mtp_jax.model.sharding import constrain, partition, sharded, ways


@struct.dataclass
class Scored:
    """Rows as the choice of their experts takes them.

    Attributes:
        logits: the router's, float32.
        counts: which rows count; None: all.
        given: the experts of rows that do not choose; None: all choose.
    """

    logits: Float[Array, "B W E"]
    counts: Bool[Array, "B W"] | None = None
    given: Int[Array, "B W k"] | None = None


@struct.dataclass
class OwnExperts:
    """The routed experts of one device.

    Attributes:
        gate_up, down: their weights.
        first: number of the first of them.
        shards: number of devices that all experts are split over.
    """

    gate_up: ExpertWeight
    down: ExpertWeight
    first: Int[Array, ""] | int = 0
    shards: int = struct.field(pytree_node=False, default=1)


@dataclass(frozen=True)
class Experts:
    """Router, routed experts and shared expert of an MoE block.

    Attributes:
        on: computes the products.
        way: "dense", which is the reference and has derivatives, or "sparse".
        exchange: the exchange between data shards; None: each shard gathers all rows.
    """

    on: Products
    way: Way = "sparse"
    exchange: Exchange | None = None

    def moe(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Rows,
        counts: Bool[Array, "B W"] | None = None,
        tokens: Int[Array, "B W"] | None = None,
    ) -> tuple[tuple[ProductResult, ...], Routing]:
        """Returns (the result of the routed experts and that of the shared expert, to be added; routing).

        tokens: the rows' ids, where a token chooses experts.
        """
        on, whole, limit = self.on, self.on.plain(x), cfg.swiglu_limit
        with jax.named_scope("moe_route"):
            scored = Scored(on.exactly(whole, p.router), counts)
            if p.by_token is not None:
                assert tokens is not None, "rows whose tokens choose have tokens"
                scored = replace(scored, given=jnp.take(p.by_token, tokens, axis=0, mode="clip"))
        with jax.named_scope("moe_experts"):
            if on.mesh is not None:
                y, r = self._expert_parallel(p, cfg, x, scored)
            else:
                r = self._choose(cfg, p.bias, scored, OwnGroups(0, p.down.shape[0]))
                if self.way == "dense":
                    rows = whole.reshape(-1, whole.shape[-1])
                    y = moe.dense(p.gate_up, p.down, rows, r, on.product, limit)
                else:
                    own = OwnExperts(p.gate_up, p.down)
                    y = self.routed(own, self.operand(p, x).flat(), r, limit)
        y, r = y.reshape(whole.shape), _shaped(r, whole)
        if on.mesh is not None:
            y = constrain(y, on.mesh, "slots", None, None)
        if p.shared is None:
            return (y,), r
        with jax.named_scope("moe_shared"):
            shared = on.mlp(x, p.shared, limit)
        # The two are added here, so that one collective sums both over ``model``.
        return ((y + shared,) if ways("heads", on.mesh) > 1 else (y, shared)), r

    def _choose(
        self,
        cfg: ModelConfig,
        bias: Float[Array, " E"] | None,
        scored: Scored,
        own: OwnGroups | None = None,
    ) -> Routing:
        """Groups, then experts, chosen by corrected score (arXiv 2412.19437, eqs. 12-16), or by token."""
        with jax.named_scope("moe_route"):
            flat, rule = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), scored), rule_of(cfg)
            if flat.given is not None:
                return Routing(*router.given(flat.logits, flat.given, rule, flat.counts))
            assert bias is not None, "a router that chooses has a bias"
            return self.choose_experts(flat.logits, bias, rule, flat.counts, own)

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
        own: OwnGroups | None = None,
    ) -> Routing:
        """The experts of each row; a row that does not count has id E, which is no expert.

        own: this device's experts. A kernel lays out the rows of few tokens by them.
        """
        del own  # no kernel multiplies
        return Routing(*router.choose(logits, bias, rule, counted))

    def routed(
        self,
        own: OwnExperts,
        x: Float[Array, "T D"] | Quantised,
        r: Routing,
        limit: float | None = None,
    ) -> Any:
        """Run only the experts that rows chose: [T, D], or ``Weighed`` on one device.

        Rows and routing are of all devices.

        limit: see ``layers.gated``.
        """
        assert not isinstance(x, Quantised), "rows were quantised for a kernel"
        chosen = Routing(r.ids - own.first, r.weights)
        return moe.by_visit(own.gate_up, own.down, x, chosen, self.on.product, limit)

    def operand(self, p: Moe, x: Rows) -> Operand:
        """Rows in the form that the experts take."""
        return Operand(self.on.plain(x))

    def _expert_parallel(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Rows,
        scored: Scored,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Each device's own experts: rows go to them over ``data``, parts are summed over both axes."""
        by = self._gather_all if self.exchange is None else self._exchanged

        def local(moe: Moe, x: Operand, scored: Scored) -> tuple[Array | None, ...]:
            y, r = by(moe, cfg, x, scored)
            return y, r.ids, r.weights, r.over

        given = self.operand(p, x)
        experts, slots, everywhere = PartitionSpec(("data", "model")), partition("slots"), PartitionSpec()
        own = Moe(None, p.bias, p.gate_up, p.down, None, p.copies)
        of_own = Moe(None, everywhere, experts, experts, None, everywhere)
        specs = of_own, given.split(), slots
        run = sharded(local, self.on.mesh, specs, (slots, slots, slots, everywhere))
        y, ids, weights, over = run(own, given, scored)
        return y, Routing(ids, weights, over=over)

    def _gather_all(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Operand,
        scored: Scored,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over all rows. Choosing for all rows takes less than gathering choices."""
        (own, width, _), counts = scored.logits.shape, scored.counts
        mine = jax.lax.axis_index("data") * own
        if (
            self._mesh.shape["data"] > 1
        ):  # a gather leaves out the rows that fill tiles, which kernels add again
            x = x.gathered(own * width)
        own_experts = None if p.copies is not None else OwnGroups(self._first(p), p.down.shape[0])
        r = self._choose(cfg, p.bias, jax.tree.map(_gathered, scored), own_experts)
        part = self._own_experts(p, x, _in_slots(p, r, 0), limit=cfg.swiglu_limit)
        part = jax.lax.psum(part.reshape(-1, width, part.shape[-1]), "model")
        r = _shaped(r, part)
        ids, weights = (jax.lax.dynamic_slice_in_dim(a, mine, own) for a in (r.ids, r.weights))
        if counts is not None:  # a kernel chooses for all rows
            ids = jnp.where(counts[..., None], ids, -1)
        return jax.lax.psum_scatter(part, "data", tiled=True), Routing(ids, weights)

    def _exchanged(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Operand,
        scored: Scored,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over rows of an all-to-all, or of a gather where its room is too small."""
        exchange, devices = self.exchange, self._mesh.size
        assert exchange is not None
        (slots, width, _), counts = scored.logits.shape, scored.counts
        count = slots * width
        r = self._choose(cfg, p.bias, scored)
        if counts is not None:  # rows that do not count take no room
            r = Routing(jnp.where(counts.reshape(-1, 1), r.ids, -1), r.weights)
        chosen = _in_slots(p, r, jax.lax.axis_index("data") * count)

        def run(rows: tuple[Array, ...], ids: Array, weights: Array) -> Array:
            # Tiles are sized as if this number of devices shared the experts.
            shards = max(1, len(ids) * devices // (exchange.shards * count))
            given = Operand.of_rows_first(*rows), Routing(ids, weights)
            return self._own_experts(p, *given, shards, cfg.swiglu_limit)

        given = x.rows_first(count), chosen.ids, chosen.weights
        wanted = exchange.wanted(chosen.ids, p.down.shape[0] * devices // exchange.domains)
        capacity = exchange.capacity(count, cfg, neighbours=p.copies is None)
        most = jax.lax.pmax(wanted.sum(axis=0).max(), ("data", "model"))

        def there(rows: tuple[Array, ...], ids: Array, weights: Array) -> Array:
            return exchange.by_all_to_all(rows, ids, weights, wanted, capacity, run)

        part = there(*given)
        if capacity < count:
            # Both are computed, as the contents of a condition do not overlap with another micro-batch.
            part = jax.lax.cond(
                most > capacity, lambda _, *given: by_gather(run, *given), lambda part, *_: part, part, *given
            )
        part = jax.lax.psum(part.reshape(slots, width, -1), "model")
        r = Routing(r.ids, r.weights, over=(most > capacity).astype(jnp.int32))
        return part, _shaped(r, part)

    def _own_experts(
        self, p: Moe, x: Operand, r: Routing, shards: int | None = None, limit: float | None = None
    ) -> Float[Array, "T D"]:
        first, rows = self._first(p), x.flat()
        if self.way == "dense" and not isinstance(rows, Quantised):
            chosen = Routing(r.ids - first, r.weights)
            return moe.dense(p.gate_up, p.down, rows, chosen, self.on.product, limit)
        own = OwnExperts(p.gate_up, p.down, first, shards or self._mesh.size)
        return self.routed(own, rows, r, limit)

    def _first(self, p: Moe) -> Int[Array, ""]:
        """The number of this device's first expert."""
        return jax.lax.axis_index(("data", "model")) * p.down.shape[0]

    @property
    def _mesh(self) -> Mesh:
        assert self.on.mesh is not None, "one device has nothing to exchange"
        return self.on.mesh


def rule_of(cfg: ModelConfig) -> Rule:
    """The rule by which a model's rows choose experts."""
    sizes = cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group
    return Rule(*sizes, cfg.norm_topk_prob, cfg.routed_scaling_factor, cfg.scoring_func)


def _in_slots(p: Moe, r: Routing, first: Int[Array, ""] | int) -> Routing:
    """The expert slots that serve each row, of rows numbered from ``first``."""
    if p.copies is None:
        return r
    return Routing(slots_of(p.copies, r.ids, first + jnp.arange(len(r.ids))), r.weights)


def _shaped(r: Routing, x: Float[Array, "*b D"]) -> Routing:
    shape = (*x.shape[:-1], r.ids.shape[-1])
    return Routing(r.ids.reshape(shape), r.weights.reshape(shape), over=r.over)


def _gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "data", tiled=True)
