"""Experts by kernels on a Hopper GPU (docs/kernels.md)."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Bool, Float

from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.grouped_matmul.layout import OwnGroups
from kernels_pallas.quantised import Quantised
from kernels_pallas.router import api as router
from kernels_pallas.router.reference import ROWS
from kernels_pallas.router.rule import Rule
from kernels_pallas.weighed import Weighed
from mtp_jax.errors import ConfigError
from mtp_jax.model.experts.plain import Experts, OwnExperts
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Fp4
from mtp_jax.model.params import Moe
from mtp_jax.model.products import e4m3
from mtp_jax.model.products.e4m3 import Operand
from mtp_jax.model.products.hopper import HopperProducts, check_experts


@dataclass(frozen=True)
class HopperExperts(Experts):
    """Experts by kernels. Raises ConfigError for dense experts."""

    on: HopperProducts

    def __post_init__(self) -> None:
        if self.way == "dense" and "grouped_matmul" in self.on.kernels:
            raise ConfigError("experts = 'dense' has no kernel; use 'sparse', or leave experts to XLA")

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
        own: OwnGroups | None = None,
    ) -> Routing:
        """The choice by a kernel that also counts the choices of each expert, or lays out the rows of few."""
        if not self.on.can("router", router.check, logits.shape[1], rule):
            return super().choose_experts(logits, bias, rule, counted)
        choice = router.choose(logits, bias, rule, counted, own, implementation="mosaic_gpu")
        return Routing(choice.ids, choice.weights, choice.counts, choice.groups)

    def operand(self, p: Moe, x: Any) -> Operand:
        """Rows for the experts, in e4m3 if their kernels take it."""
        if self.on.takes(p, e4m3.dtype_of(x)):
            return e4m3.operand(x)
        return super().operand(p, x)

    def routed(
        self,
        own: OwnExperts,
        x: Float[Array, "T D"] | Quantised,
        r: Routing,
        limit: float | None = None,
    ) -> Float[Array, "T D"] | Weighed:
        """Routed experts by kernels; on one device the next norm may weigh them. Rows may be padded.

        Raises ConfigError if kernels must compute them and cannot.
        """
        weights = own.gate_up, own.down
        kernel = "grouped_matmul/fp4" if isinstance(own.gate_up, Fp4) else "grouped_matmul"
        if not isinstance(x, Quantised) and not self.on.runs(kernel, check_experts, x, *weights):
            return super().routed(own, x, r, limit)
        (first_layer, first_scale), (second_layer, second_scale) = map(e4m3.arrays, weights)
        return grouped_matmul.expert_mlp(
            x,
            r.ids,
            r.weights,
            first_layer,
            second_layer,
            first_scale,
            second_scale,
            counts=r.counts if "expert_layout" in self.on.kernels else None,
            groups=r.groups,
            first=own.first,
            shards=own.shards,
            limit=limit,
            # The router writes blocks of tokens; a norm of fewer would need two slices, each a launch.
            summed=self.on.mesh is not None or len(r.ids) % ROWS > 0,
            implementation="mosaic_gpu",
        )
