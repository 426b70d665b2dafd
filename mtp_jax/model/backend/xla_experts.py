"""Products, and the second half of a block made of them: MLPs, the router and its experts, in plain XLA."""

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
from mtp_jax.model import moe
from mtp_jax.model.backend.exchange import Exchange, by_gather
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.expert_slots import slots_of
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.moe import Experts, Routing, Weight
from mtp_jax.model.narrow import Narrow, expand
from mtp_jax.model.params import Layer, Mlp, Moe
from mtp_jax.model.sharding import constrain, partition, sharded, ways

Split = Literal["out", "in"]
Stream = Any
"""The residual stream [B, W, D] between two stages: an array at first, then as the backend keeps it."""
Rows = Any
"""The rows that a norm hands to products: [B, W, D], as the backend keeps them."""


@dataclass(frozen=True)
class XlaExperts:
    """See the package.

    Attributes:
        mesh: the mesh of devices; None for one device.
        experts: "dense", which is the reference, or "sparse"; on a mesh they always run in parallel.
        exchange: between data shards; None: each gathers the rows of all.
        micro_batches: that a pass is cut into where its slots allow it, 1 or 2.
    """

    mesh: Mesh | None = None
    experts: Experts = "sparse"
    exchange: Exchange | None = None
    micro_batches: int = 1

    def feed_forward(
        self, p: Layer, cfg: ModelConfig, x: Stream, counts: Bool[Array, "B W"] | None
    ) -> tuple[Stream, Routing | None]:
        """A dense MLP, or the router and its experts. Returns (x, routing of an MoE block).

        counts: rows that do not count visit no routed expert; None: all count.
        """
        normed = rms_norm(x, p.mlp_norm, cfg.rms_norm_eps)
        added, routing = self._fed(p, cfg, normed, counts)
        return constrain(x + functools.reduce(jnp.add, added), self.mesh, "slots", None, None), routing

    # Products

    def linear(
        self, x: Rows, w: Float[Array, "*o i"] | Narrow, *, split: Split | None = None
    ) -> Float[Array, "..."]:
        """``x @ w.T``: weights have output features first, as in the checkpoint; narrow weights are expanded.

        split: whether ``model`` splits the first output axis or the input features of w.
        """
        return self.product(x, w, x.dtype)

    def product(
        self, x: Float[Array, "... i"], w: Float[Array, "*o i"] | Narrow, dtype: Any
    ) -> Float[Array, "..."]:
        """``x @ w.T``, accumulated in float32."""
        w = expand(w, x.dtype)
        flat_x, flat_w = x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1])
        y = jax.lax.dot_general(flat_x, flat_w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return y.reshape(*x.shape[:-1], *w.shape[:-1])

    def plain(self, x: Rows) -> Float[Array, "B W D"]:
        """Rows as an array."""
        return x

    def exactly(self, x: Rows, w: Float[Array, "o i"]) -> Float[Array, "*b o"]:
        """A product in float32, also where the device would rather multiply float32 with fewer bits."""
        with jax.default_matmul_precision("highest"):
            return self.product(self.plain(x).astype(jnp.float32), w, jnp.float32)

    def mlp(self, x: Rows, p: Mlp) -> Float[Array, "B W D"]:
        """``down(silu(gate(x)) * up(x))``."""
        gate_up = self.linear(x, p.gate_up)
        return self.linear(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], p.down)

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
                    y = moe.dense(p.gate_up, p.down, flat, r, self.product)
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
            counted = None if counts is None else counts.reshape(-1)
            return self.choose_experts(logits.reshape(-1, logits.shape[-1]), bias, rule, counted)

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
    ) -> Routing:
        """The experts of each row; a row that does not count has id E, which is no expert."""
        return Routing(*router.choose(logits, bias, rule, counted))

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

        x: rows of ``flat_rows``. shards: number of devices that the experts are split over.
        Weights are one device's, from expert ``first`` on; rows and routing are all devices'.
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

    def rows_first(self, rows: Any, count: int) -> Any:
        """The first ``count`` of ``flat_rows`` as a tree of arrays with rows first."""
        return rows[:count]

    def from_rows_first(self, tree: Any) -> Any:
        """Undoes ``rows_first``."""
        return tree

    def _expert_parallel(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Rows,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Each device's own experts: rows go to them over ``data``, parts are summed over both axes."""
        mesh, by = self.mesh, self._gather_all if self.exchange is None else self._exchanged
        assert mesh is not None, "one device has nothing to exchange"

        def local(moe: Moe, x: Any, logits: Any, counts: Any) -> tuple[Any, ...]:
            y, r = by(moe, cfg, x, logits, counts)
            return y, r.ids, r.weights, r.over

        given, of_x = self.operand(p, x)
        experts, slots, everywhere = PartitionSpec(("data", "model")), partition("slots"), PartitionSpec()
        own = Moe(None, p.bias, p.gate_up, p.down, None, p.copies)
        of_own = Moe(None, everywhere, experts, experts, None, everywhere)
        run = sharded(local, mesh, (of_own, of_x, slots, slots), (slots, slots, slots, everywhere))
        y, ids, weights, over = run(own, given, logits, counts)
        return y, Routing(ids, weights, over=over)

    def _gather_all(
        self,
        p: Moe,
        cfg: ModelConfig,
        x: Any,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over all rows. Choosing for all rows takes less than gathering choices."""
        mine, own = jax.lax.axis_index("data") * logits.shape[0], logits.shape[0]
        x, logits = self.gathered(x, math.prod(logits.shape[:2])), _gathered(logits)
        r = self._choose(cfg, p.bias, logits, None if counts is None else _gathered(counts))
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
        x: Any,
        logits: Float[Array, "B W E"],
        counts: Bool[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B W D"], Routing]:
        """Run one device's experts over rows of an all-to-all, or of a gather where its room is too small."""
        exchange, mesh = self.exchange, self.mesh
        assert exchange is not None
        assert mesh is not None, "one device has nothing to exchange"
        count = math.prod(logits.shape[:2])
        r = self._choose(cfg, p.bias, logits, counts)
        if counts is not None:  # rows that do not count take no room
            r = Routing(jnp.where(counts.reshape(-1, 1), r.ids, -1), r.weights)
        chosen = _in_slots(p, r, jax.lax.axis_index("data") * count)

        def run(rows: Any, ids: Array, weights: Array) -> Array:
            # The share of other devices' rows is as if this many devices shared the experts.
            shards = max(1, len(ids) * mesh.size // (exchange.shards * count))
            return self._own_experts(p, self.from_rows_first(rows), Routing(ids, weights), shards)

        given = self.rows_first(self.flat_rows(x), count), chosen.ids, chosen.weights
        wanted = exchange.wanted(chosen.ids, p.down.shape[0] * mesh.size // exchange.domains)
        capacity = exchange.capacity(count, cfg, grouped=p.copies is None)
        most = jax.lax.pmax(wanted.sum(axis=0).max(), ("data", "model"))

        def there(rows: Any, ids: Array, weights: Array) -> Array:
            return exchange.by_all_to_all(rows, ids, weights, wanted, capacity, run)

        part = there(*given)
        if capacity < count:
            # Not one or the other: the contents of a condition run beside nothing of another micro-batch.
            part = jax.lax.cond(
                most > capacity, lambda _, *given: by_gather(run, *given), lambda part, *_: part, part, *given
            )
        part = jax.lax.psum(part.reshape(*logits.shape[:2], -1), "model")
        r = Routing(r.ids, r.weights, over=(most > capacity).astype(jnp.int32))
        return part, _shaped(r, part)

    def _own_experts(self, p: Moe, x: Any, r: Routing, shards: int | None = None) -> Float[Array, "T D"]:
        assert self.mesh is not None
        first = jax.lax.axis_index(("data", "model")) * p.down.shape[0]
        return self.routed(p.gate_up, p.down, x, r, shards or self.mesh.size, first)


def _in_slots(p: Moe, r: Routing, first: Int[Array, ""] | int) -> Routing:
    """Which of a mesh's slots serve each row, of rows numbered from ``first``."""
    if p.copies is None:
        return r
    return Routing(slots_of(p.copies, r.ids, first + jnp.arange(len(r.ids))), r.weights)


def _shaped(r: Routing, x: Float[Array, "*b D"]) -> Routing:
    shape = (*x.shape[:-1], r.ids.shape[-1])
    return replace(r, ids=r.ids.reshape(shape), weights=r.weights.reshape(shape))


def _gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "data", tiled=True)
