"""The router and its experts in plain XLA, on one device or in parallel over a mesh."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul.layout import Own
from kernels_pallas.quantised import Quantised
from kernels_pallas.router import reference as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import moe
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import slots_of
from mtp_jax.model.experts.exchange import Exchange, by_gather
from mtp_jax.model.moe import Routing, Way, Weight
from mtp_jax.model.params import Moe
from mtp_jax.model.products.e4m3 import Operand
from mtp_jax.model.products.plain import Products, Rows
from mtp_jax.model.sharding import constrain, partition, sharded, ways


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
        self, p: Moe, cfg: ModelConfig, x: Rows, counts: Bool[Array, "B W"] | None = None
    ) -> tuple[tuple[Float[Array, "B W D"], ...], Routing]:
        """Returns (the result of the routed experts and that of the shared expert, to be added; routing)."""
        on, whole = self.on, self.on.plain(x)
        with jax.named_scope("moe_route"):
            logits = on.exactly(whole, p.router)
        with jax.named_scope("moe_experts"):
            if on.mesh is not None:
                y, r = self._expert_parallel(p, cfg, x, logits, counts)
            else:
                r = self._choose(cfg, p.bias, logits, counts, Own(0, p.down.shape[0]))
                if self.way == "dense":
                    y = moe.dense(p.gate_up, p.down, whole.reshape(-1, whole.shape[-1]), r, on.product)
                else:
                    y = self.routed(p.gate_up, p.down, self.operand(p, x).flat(), r)
        y, r = y.reshape(whole.shape), _shaped(r, whole)
        y = constrain(y, on.mesh, "slots", None, None)
        if p.shared is None:
            return (y,), r
        with jax.named_scope("moe_shared"):
            shared = on.mlp(x, p.shared)
        # The two are added here, so that one collective sums both over ``model``.
        return ((y + shared,) if ways("heads", on.mesh) > 1 else (y, shared)), r

    def route(self, p: Moe, cfg: ModelConfig, x: Float[Array, "*b D"]) -> Routing:
        """The routing of rows of any shape."""
        return _shaped(self._choose(cfg, p.bias, self.on.exactly(x, p.router), None), x)

    def _choose(
        self,
        cfg: ModelConfig,
        bias: Float[Array, " E"],
        logits: Float[Array, "... E"],
        counts: Bool[Array, "B W"] | None,
        own: Own | None = None,
    ) -> Routing:
        """Sigmoid scores; groups, then experts, chosen by corrected score (arXiv 2412.19437, eqs. 12-16)."""
        with jax.named_scope("moe_route"):
            counted = None if counts is None else counts.reshape(-1)
            flat = logits.reshape(-1, logits.shape[-1])
            return self.choose_experts(flat, bias, rule_of(cfg), counted, own)

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
        own: Own | None = None,
    ) -> Routing:
        """The experts of each row; a row that does not count has id E, which is no expert.

        own: this device's experts. A kernel lays out the rows of few tokens by them.
        """
        del own  # no kernel multiplies
        return Routing(*router.choose(logits, bias, rule, counted))

    def routed(
        self,
        gate_up: Weight,
        down: Weight,
        x: Float[Array, "T D"] | Quantised,
        r: Routing,
        shards: int = 1,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "T D"]:
        """Run only the experts that rows chose.

        shards: number of devices that the experts are split over. Weights are one device's, from expert
        ``first`` on; rows and routing are those of all devices.
        """
        assert not isinstance(x, Quantised), "rows were quantised for a kernel"
        return moe.by_visit(gate_up, down, x, Routing(r.ids - first, r.weights), self.on.product)

    def operand(self, p: Moe, x: Rows) -> Operand:
        """Rows in the form that the experts take."""
        return Operand(self.on.plain(x))

    def _expert_parallel(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Rows,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Each device's own experts: rows go to them over ``data``, parts are summed over both axes."""
        by = self._gather_all if self.exchange is None else self._exchanged

        def local(moe: Moe, x: Operand, logits: Array, counts: Array | None) -> tuple[Array | None, ...]:
            y, r = by(moe, cfg, x, logits, counts)
            return y, r.ids, r.weights, r.over

        given = self.operand(p, x)
        experts, slots, everywhere = PartitionSpec(("data", "model")), partition("slots"), PartitionSpec()
        own = Moe(None, p.bias, p.gate_up, p.down, None, p.copies)
        of_own = Moe(None, everywhere, experts, experts, None, everywhere)
        specs = of_own, given.split(), slots, slots
        run = sharded(local, self.on.mesh, specs, (slots, slots, slots, everywhere))
        y, ids, weights, over = run(own, given, logits, counts)
        return y, Routing(ids, weights, over=over)

    def _gather_all(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Operand,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over all rows. Choosing for all rows takes less than gathering choices."""
        mine, own = jax.lax.axis_index("data") * logits.shape[0], logits.shape[0]
        x, logits = x.gathered(math.prod(logits.shape[:2])), _gathered(logits)
        own_experts = None if p.copies is not None else Own(self._first(p), p.down.shape[0])
        counted = None if counts is None else _gathered(counts)
        r = self._choose(cfg, p.bias, logits, counted, own_experts)
        part = self._own_experts(p, x, _in_slots(p, r, 0))
        part = jax.lax.psum(part.reshape(*logits.shape[:2], -1), "model")
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
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over rows of an all-to-all, or of a gather where its room is too small."""
        exchange, devices = self.exchange, self._mesh.size
        assert exchange is not None
        count = math.prod(logits.shape[:2])
        r = self._choose(cfg, p.bias, logits, counts)
        if counts is not None:  # rows that do not count take no room
            r = Routing(jnp.where(counts.reshape(-1, 1), r.ids, -1), r.weights)
        chosen = _in_slots(p, r, jax.lax.axis_index("data") * count)

        def run(rows: tuple[Array, ...], ids: Array, weights: Array) -> Array:
            # Tiles are sized as if this number of devices shared the experts.
            shards = max(1, len(ids) * devices // (exchange.shards * count))
            return self._own_experts(p, Operand.of_rows_first(*rows), Routing(ids, weights), shards)

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
        part = jax.lax.psum(part.reshape(*logits.shape[:2], -1), "model")
        r = Routing(r.ids, r.weights, over=(most > capacity).astype(jnp.int32))
        return part, _shaped(r, part)

    def _own_experts(self, p: Moe, x: Operand, r: Routing, shards: int | None = None) -> Float[Array, "T D"]:
        first, rows = self._first(p), x.flat()
        if self.way == "dense" and not isinstance(rows, Quantised):
            return moe.dense(p.gate_up, p.down, rows, Routing(r.ids - first, r.weights), self.on.product)
        return self.routed(p.gate_up, p.down, rows, r, shards or self._mesh.size, first)

    def _first(self, p: Moe) -> Int[Array, ""]:
        """The number of this device's first expert."""
        return jax.lax.axis_index(("data", "model")) * p.down.shape[0]

    @property
    def _mesh(self) -> Mesh:
        assert self.on.mesh is not None, "one device has nothing to exchange"
        return self.on.mesh


def rule_of(cfg: ModelConfig) -> Rule:
    """The rule by which a model's rows choose experts."""
    return Rule(
        cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group, cfg.norm_topk_prob, cfg.routed_scaling_factor
    )


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
