"""Experts for few rows on a CPU: all pairs of a row and an expert at once."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul.layout import OwnGroups
from kernels_pallas.quantised import Quantised
from kernels_pallas.router.rule import Rule
from mtp_jax.model.experts import cpu_router
from mtp_jax.model.experts.plain import Experts, OwnExperts
from mtp_jax.model.layers import gated
from mtp_jax.model.moe import ExpertWeight, Routing
from mtp_jax.model.narrow import flat, nbytes
from mtp_jax.model.products import cpu_lanes
from mtp_jax.model.products.cpu import LANED
from mtp_jax.model.products.cpu_lanes import CACHE_BYTES, SLICES, LeadPlaces, Pick, multiply, sum_lanes

# ``by_pair``, which widens an expert's weights again for each pair, is faster up to this number of pairs per
# expert that a core's cache does not hold; for others as long as loops are (``LANED``).
_PAIRS = 4


@dataclass(frozen=True)
class CpuExperts(Experts):
    """Experts in forms that XLA computes fast on a CPU (docs/cpu.md)."""

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
        own: OwnGroups | None = None,
    ) -> Routing:
        """The choice of experts, by comparisons for few rows."""
        del own  # no kernel multiplies
        return Routing(*cpu_router.choose(logits, bias, rule, counted))

    def routed(
        self,
        own: OwnExperts,
        x: Float[Array, "T D"] | Quantised,
        r: Routing,
        limit: float | None = None,
    ) -> Float[Array, "T D"]:
        """The routed experts, by ``by_pair`` for few rows."""
        few = own.shards == 1 and takes(own.gate_up, own.down, r.ids.size)
        if few and not isinstance(x, Quantised):
            return by_pair(own.gate_up, own.down, x, Routing(r.ids - own.first, r.weights), limit)
        return super().routed(own, x, r, limit)


def by_pair(
    gate_up: ExpertWeight, down: ExpertWeight, x: Float[Array, "T D"], r: Routing, limit: float | None = None
) -> Float[Array, "T D"]:
    """Multiply each row with each of its experts apart, all pairs at once: for few rows per expert.

    Ids outside ``[0, E)`` contribute nothing. A row's experts are summed in float32. The result of a row does
    not depend on other rows or their number.
    """
    (rows, k), experts = r.ids.shape, down.shape[0]
    inside = (r.ids >= 0) & (r.ids < experts)
    (gate_up, first), (down, _) = flat(gate_up), flat(down)
    ids = first + jnp.where(inside, r.ids, 0)
    chosen, row = ids.reshape(rows * k), jnp.arange(rows * k) // k
    # Pairs of one expert follow each other: after the first its weights come from a cache.
    order = jnp.argsort(chosen, stable=True) if rows > 1 else slice(None)
    gate, up = jnp.moveaxis(_pair_products(gate_up, chosen[order], x[row[order]]), 1, 0)
    act = gated(gate, up, limit).astype(x.dtype)
    if rows > 1:
        act = jnp.zeros_like(act).at[order].set(act, unique_indices=True)
    act = act.reshape(rows, k, -1) * jnp.where(inside, r.weights, 0)[..., None]
    return _mixed_products(down, ids, act).astype(x.dtype)


def _pair_products(w: ExpertWeight, expert: Int[Array, " p"], x: Float[Array, "p i"]) -> Float[Array, "p *o"]:
    """``w[expert[p]] @ x[p]`` in float32."""
    (pairs, _), outputs = x.shape, math.prod(w.shape[1:-1])
    spread = LeadPlaces((pairs, outputs), (0, 1), (0,))
    products = multiply(w, (-1, outputs), _picked(expert, (1, 2)), x.astype(jnp.float32), spread)
    return sum_lanes(products).reshape(pairs, *w.shape[1:-1])


def _mixed_products(
    w: ExpertWeight, experts: Int[Array, "T k"], x: Float[Array, "T k i"]
) -> Float[Array, "T o"]:
    """The sum over k of ``w[experts[t, k]] @ x[t, k]``, by the same loop; lanes are summed once for all k.

    Output features are outermost: the weights that the rows read for one of them stay in the nearest cache.
    """
    (rows, k), outputs = experts.shape, w.shape[1]
    spread, total = LeadPlaces((outputs, rows), (0, 1), (1,)), jnp.zeros((), jnp.float32)
    for j in range(k):
        pick = _picked(experts[:, j], (0, 2))
        total += multiply(w, (-1, outputs), pick, x[:, j], spread, SLICES // k)
    return sum_lanes(total).T


def _picked(expert: Int[Array, " p"], rest: tuple[int, int]) -> Pick:
    """Looks up experts in an array [E, o, n]. rest: the axes of o and n in the result; p has the third."""
    numbers = jax.lax.GatherDimensionNumbers(rest, (0,), (0,))

    def pick(a: jax.Array) -> jax.Array:
        size, mode = (1, *a.shape[1:]), jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(a, expert[:, None], numbers, size, mode=mode)

    return pick


def takes(gate_up: Any, down: Any, pairs: int) -> bool:
    """Whether ``by_pair`` is the faster way for this number of pairs of a row and an expert."""
    if not (cpu_lanes.takes(gate_up) and cpu_lanes.takes(down)):
        return False
    experts = down.shape[0]
    cached = nbytes((gate_up, down)) <= experts * CACHE_BYTES
    return pairs <= experts * (LANED if cached else _PAIRS)
