"""Products, and the second half of a block made of them: MLPs, the router and its experts, in plain XLA."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.router import reference as router
from kernels_pallas.router.rule import Rule
from mtp_jax.model import moe
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.moe import Experts, Routing, Weight
from mtp_jax.model.narrow import Narrow, expand
from mtp_jax.model.params import Layer, Mlp, Moe
from mtp_jax.model.sharding import constrain, partition, sharded, ways

Split = Literal["out", "in"]
Stream = Any
"""The residual stream [B, W, D] between two stages: an array at first, then as the backend keeps it."""
Rows = Any
"""What a norm hands to the products that read it: [B, W, D], as the backend keeps it."""


@dataclass(frozen=True)
class XlaExperts:
    """See the package.

    Attributes:
        mesh: of devices; None for one device.
        experts: "dense", which is the reference, or "sparse"; on a mesh they always run in parallel.
    """

    mesh: Mesh | None = None
    experts: Experts = "sparse"

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
        """``x @ w.T``: weights have output features first, as in the checkpoint; narrow ones are expanded.

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
        """The experts of each row; those of rows that do not count have id E, which is none."""
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

        x: rows as ``flat_rows`` gives them. shards: number of devices that the experts are split over.
        Weights are those of one device, from expert ``first`` on; rows and routing are those of all devices.
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
