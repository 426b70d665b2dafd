"""Routed experts: the type of a router's choice, and two ways to run the experts of rows by XLA.

``dense`` is the obviously right one; ``by_visit`` visits only the experts that some row chose.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.model.layers import gated
from mtp_jax.model.narrow import Narrow, expand, index

Way = Literal["dense", "sparse"]
ExpertWeight = Float[Array, "E ..."] | Narrow
Product = Callable[[jax.Array, Any, Any], jax.Array]
"""``x @ w.T`` in a dtype (see ``Products.product``)."""

# Least and most rows of a tile, which one visit to an expert multiplies.
_TILES = 8, 64


@struct.dataclass
class Routing:
    """Chosen experts and their weights; ids outside ``[0, E)`` contribute nothing and cost nothing.

    ``counts``: choices of each expert per 4 rows, if a kernel chose; other kernels read them.
    ``groups``: the layout of few rows by expert, if the kernel made it with the choice.
    ``over``: 1 where an all-to-all had no room for all rows, so that they were gathered; else 0, or None.
    """

    ids: Int[Array, "*b k"]
    weights: Float[Array, "*b k"]
    counts: Int[Array, "n E"] | None = None
    groups: Any = None
    over: Int[Array, ""] | None = None


def dense(
    gate_up: ExpertWeight,
    down: ExpertWeight,
    x: Float[Array, "T D"],
    r: Routing,
    product: Product,
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """Run every expert on every row, weighted: the reference. Experts not chosen weigh zero.

    limit: see ``layers.gated``.
    """
    gate_up, down = expand(gate_up, x.dtype), expand(down, x.dtype)
    one_hot = jax.nn.one_hot(r.ids, down.shape[0], dtype=jnp.float32)
    weight = jnp.einsum("tke,tk->te", one_hot, r.weights)
    hidden = product(x, gate_up, x.dtype)
    act = gated(hidden[:, :, 0], hidden[:, :, 1], limit)
    act = (act * weight[..., None]).astype(x.dtype)
    side_by_side = jnp.moveaxis(down, 0, 1).reshape(x.shape[-1], -1)
    return product(act.reshape(len(x), -1), side_by_side, jnp.float32).astype(x.dtype)


def by_visit(
    gate_up: ExpertWeight,
    down: ExpertWeight,
    x: Float[Array, "T D"],
    r: Routing,
    product: Product,
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """Visit each chosen expert with its own rows only, in tiles of about the mean number of an expert's rows.

    Ids outside ``[0, E)`` contribute nothing. A row's experts are summed in float32 in router order.
    Its derivatives are computed by ``dense``: a loop whose length depends on the rows has none in reverse.
    """

    @jax.custom_jvp
    def visited(
        gate_up: ExpertWeight, down: ExpertWeight, x: jax.Array, ids: jax.Array, weights: jax.Array
    ) -> jax.Array:
        return _by_visit(gate_up, down, x, Routing(ids, weights), product, limit)

    @visited.defjvp
    def _(values: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        def every(
            gate_up: ExpertWeight, down: ExpertWeight, x: jax.Array, ids: jax.Array, w: jax.Array
        ) -> jax.Array:
            return dense(gate_up, down, x, Routing(ids, w), product, limit)

        return visited(*values), jax.jvp(every, values, tangents)[1]

    return visited(gate_up, down, x, r.ids, r.weights)


def _by_visit(
    gate_up: ExpertWeight,
    down: ExpertWeight,
    x: Float[Array, "T D"],
    r: Routing,
    product: Product,
    limit: float | None,
) -> Float[Array, "T D"]:
    (rows, k), experts = r.ids.shape, down.shape[0]
    pairs, (least, most) = rows * k, _TILES
    tile = min(rows, most, max(least, 1 << (-(-pairs // experts) - 1).bit_length()))
    local = jnp.where((r.ids >= 0) & (r.ids < experts), r.ids, experts).reshape(pairs)
    order = jnp.argsort(local, stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[local].add(1)[:experts]
    first_pair = jnp.cumsum(counts) - counts
    visits = (counts + tile - 1) // tile
    last_visit = jnp.cumsum(visits)

    def visit(i: Int[Array, ""] | int, out: Float[Array, "p D"]) -> Float[Array, "p D"]:
        e = jnp.searchsorted(last_visit, i, side="right")
        lane = (i - (last_visit[e] - visits[e])) * tile + jnp.arange(tile)
        pair = order[jnp.minimum(first_pair[e] + lane, pairs - 1)]
        own = index(gate_up, e), index(down, e)
        gu = product(x[pair // k], own[0], x.dtype)
        y = product(gated(gu[:, 0], gu[:, 1], limit), own[1], x.dtype)
        return out.at[jnp.where(lane < counts[e], pair, pairs)].set(y, mode="drop")

    out = jax.lax.fori_loop(0, last_visit[-1], visit, jnp.zeros((pairs, x.shape[1]), x.dtype))
    mixed = jnp.einsum("tkd,tk->td", out.reshape(rows, k, -1).astype(jnp.float32), r.weights)
    return mixed.astype(x.dtype)
