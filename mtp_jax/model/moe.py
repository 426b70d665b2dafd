"""Mixture of experts: the sigmoid, group-limited router and interchangeable ways to run the experts.

``dense`` is the obviously right one; ``sparse`` visits only the experts that some row chose, or lets kernels
do it; ``expert_parallel`` runs ``sparse`` on every device's own experts.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model import ops, products
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.kernels import AUTO, Kernels
from mtp_jax.model.layers import expand, linear
from mtp_jax.model.params import Fp8, Moe
from mtp_jax.model.sharding import constrain, sharded, ways

Experts = Literal["dense", "sparse"]
Weight = Float[Array, "E ..."] | Fp8

# Rows that one visit to an expert handles: at least, if there are so many, and at most.
_TILES = 8, 64
# On a CPU ``by_pair`` wins up to so many pairs per expert: of experts that fit a core's cache, or of larger.
_PAIRS_CACHED, _PAIRS = 16, 4
_CACHE_BYTES = 1 << 20
# It sums slices of the input features: a vector register's worth of them, or as many as give no more slices.
_LANES, _SLICES = 16, 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Chosen experts and their weights.

    ``counts``: how often each 64 rows chose each expert, if a kernel chose; other kernels go by it.
    """

    ids: Int[Array, "*b k"]
    weights: Float[Array, "*b k"]
    counts: Int[Array, "n E"] | None = None


def router_logits(p: Moe, x: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
    """In float32, also where the device would rather multiply float32 with fewer bits."""
    with jax.default_matmul_precision("highest"):
        return linear(x.astype(jnp.float32), p.router)


def choose(
    cfg: ModelConfig, bias: Float[Array, " E"], logits: Float[Array, "T E"], kernels: Kernels
) -> Routing:
    """Sigmoid scores; groups, then experts, chosen by bias-corrected score (arXiv 2412.19437, eqs. 12-16)."""
    rule = ops.Rule(
        cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group, cfg.norm_topk_prob, cfg.routed_scaling_factor
    )
    return Routing(*ops.choose_experts(logits, bias, rule, kernels))


def _shaped(r: Routing, x: Float[Array, "*b D"]) -> Routing:
    shape = (*x.shape[:-1], r.ids.shape[-1])
    return Routing(r.ids.reshape(shape), r.weights.reshape(shape), r.counts)


def dense(gate_up: Weight, down: Weight, x: Float[Array, "T D"], r: Routing) -> Float[Array, "T D"]:
    """Every expert on every row, weighted: the reference. Experts not chosen weigh zero."""
    gate_up, down = expand(gate_up, x.dtype), expand(down, x.dtype)
    one_hot = jax.nn.one_hot(r.ids, down.shape[0], dtype=jnp.float32)
    weight = jnp.einsum("tke,tk->te", one_hot, r.weights)
    hidden = jnp.einsum("td,egid->tegi", x, gate_up)
    act = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
    act = (act * weight[..., None]).astype(x.dtype)
    return jnp.einsum("tei,edi->td", act, down, preferred_element_type=jnp.float32).astype(x.dtype)


def by_pair(
    gate_up: Float[Array, "E 2 i D"], down: Float[Array, "E D i"], x: Float[Array, "T D"], r: Routing
) -> Float[Array, "T D"]:
    """Multiply each row with each of its experts apart, all pairs at once: for few rows per expert on a CPU.

    Ids outside ``[0, E)`` contribute nothing. A row's experts are summed in float32. Its result depends
    neither on its neighbours nor on how many there are.
    """
    (rows, k), experts = r.ids.shape, down.shape[0]
    inside = (r.ids >= 0) & (r.ids < experts)
    ids = jnp.where(inside, r.ids, 0)
    chosen, row = ids.reshape(rows * k), jnp.arange(rows * k) // k
    # Pairs of one expert follow each other: after the first its weights come from a cache.
    order = jnp.argsort(chosen, stable=True) if rows > 1 else jnp.arange(k)
    gate, up = jnp.moveaxis(_pair_products(gate_up, chosen[order], x[row[order]]), 1, 0)
    act = (jax.nn.silu(gate) * up).astype(x.dtype)
    act = jnp.zeros_like(act).at[order].set(act, unique_indices=True).reshape(rows, k, -1)
    act = act * jnp.where(inside, r.weights, 0)[..., None]
    return _mixed_products(down, ids, act).astype(x.dtype)


def _pair_products(
    w: Float[Array, "E *o i"], expert: Int[Array, " p"], x: Float[Array, "p i"]
) -> Float[Array, "p *o"]:
    """``w[expert[p]] @ x[p]`` in float32, by a loop fusion that reads the weights where they lie.

    A matrix product would have them copied out of the stack first. A product with ones sums the lanes.
    """
    matrices, x32 = w.reshape(len(w), -1, w.shape[-1]), x.astype(jnp.float32)
    total = jnp.zeros((), jnp.float32)
    for part in _slices(w.shape[-1], _SLICES):
        weights = matrices[:, :, part].at[expert].get(mode="promise_in_bounds")
        total += weights.astype(jnp.float32) * x32[:, None, part]
    return _sum_lanes(total).reshape(len(x), *w.shape[1:-1])


def _mixed_products(
    w: Float[Array, "E o i"], experts: Int[Array, "T k"], x: Float[Array, "T k i"]
) -> Float[Array, "T o"]:
    """The sum over k of ``w[experts[t, k]] @ x[t, k]``, by such a loop; lanes are summed once for all k.

    Output features are outermost: what the rows read for one of them stays in the nearest cache.
    """
    total = jnp.zeros((), jnp.float32)
    for j in range(experts.shape[1]):
        for part in _slices(w.shape[-1], _SLICES // experts.shape[1]):
            weights = w[:, :, part].at[experts[:, j]].get(mode="promise_in_bounds")
            total += weights.astype(jnp.float32).swapaxes(0, 1) * x[None, :, j, part]
    return _sum_lanes(jax.lax.optimization_barrier(total)).T


def _slices(inputs: int, most: int) -> list[slice]:
    """Slices of the input features, of equal size, about ``most`` at most."""
    step = math.gcd(inputs, _LANES)
    least = -(-inputs // (step * max(most, 1))) * step
    lanes = next(n for n in range(least, inputs + 1, step) if inputs % n == 0)
    return [slice(at, at + lanes) for at in range(0, inputs, lanes)]


def _sum_lanes(x: Float[Array, "... l"]) -> Float[Array, "..."]:
    return x @ jnp.ones(x.shape[-1], x.dtype)


def _most_pairs(gate_up: Float[Array, "E 2 i D"], down: Float[Array, "E D i"]) -> int:
    """How many pairs ``by_pair`` is the faster way for."""
    experts = down.shape[0]
    cached = gate_up.nbytes + down.nbytes <= experts * _CACHE_BYTES
    return experts * (_PAIRS_CACHED if cached else _PAIRS)


def grouped(gate_up: Weight, down: Weight, x: Float[Array, "T D"], r: Routing) -> Float[Array, "T D"]:
    """Visit each chosen expert with its own rows only, a tile of about as many as an expert has at a time.

    Ids outside ``[0, E)`` contribute nothing. A row's experts are summed in float32 in router order.
    """
    (rows, k), experts = r.ids.shape, down.shape[0]
    pairs, (least, most) = rows * k, _TILES
    tile = min(rows, most, max(least, 1 << (-(-pairs // experts) - 1).bit_length()))
    local = jnp.where((r.ids >= 0) & (r.ids < experts), r.ids, experts).reshape(pairs)
    order = jnp.argsort(local, stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[local].add(1)[:experts]
    first_pair = jnp.cumsum(counts) - counts
    visits = (counts + tile - 1) // tile
    last_visit = jnp.cumsum(visits)

    def visit(i: Int[Array, ""], out: Float[Array, "p D"]) -> Float[Array, "p D"]:
        e = jnp.searchsorted(last_visit, i, side="right")
        lane = (i - (last_visit[e] - visits[e])) * tile + jnp.arange(tile)
        pair = order[jnp.minimum(first_pair[e] + lane, pairs - 1)]
        y = _expert(gate_up, down, e, x[pair // k])
        return out.at[jnp.where(lane < counts[e], pair, pairs)].set(y, mode="drop")

    out = jax.lax.fori_loop(0, last_visit[-1], visit, jnp.zeros((pairs, x.shape[1]), x.dtype))
    mixed = jnp.einsum("tkd,tk->td", out.reshape(rows, k, -1).astype(jnp.float32), r.weights)
    return mixed.astype(x.dtype)


def _expert(gate_up: Weight, down: Weight, e: Int[Array, ""], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    gate_up, down = jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, e, keepdims=False), (gate_up, down)
    )
    gu = linear(x, gate_up)
    act = jax.nn.silu(gu[:, 0]) * gu[:, 1]
    return linear(act, down)


def sparse(
    gate_up: Weight,
    down: Weight,
    x: Float[Array, "T D"] | products.Quantised,
    r: Routing,
    kernels: Kernels = AUTO,
    shards: int = 1,
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "T D"]:
    """Only the chosen experts: ``grouped``, on a CPU ``by_pair`` for few rows, or kernels.

    x: quantised rows are for kernels; there may be more of them than of the routing.
    shards: the weights are those of one of so many devices, of experts from ``first`` on; the rows and the
    routing are those of all.
    """
    if isinstance(x, products.Quantised) or ops.runs_experts(kernels, x, gate_up, down):
        rows = -(-r.ids.size // (down.shape[0] * shards))
        return ops.experts(gate_up, down, x, r.ids, r.weights, r.counts, first, rows)
    local = Routing(r.ids - first, r.weights)
    if shards == 1 and platform() == "cpu" and not isinstance(gate_up, Fp8) and not isinstance(down, Fp8):
        few = r.ids.size <= _most_pairs(gate_up, down)
        if few:
            return by_pair(gate_up, down, x, local)
    return grouped(gate_up, down, x, local)


def expert_parallel(
    p: Moe,
    cfg: ModelConfig,
    x: products.Input,
    logits: Float[Array, "B W E"],
    mesh: Mesh,
    kernels: Kernels,
) -> tuple[Float[Array, "B W D"], Routing]:
    """``sparse`` on each device's experts: gather the rows over ``data``, sum the parts over both axes.

    Every device chooses for all rows: that takes less than gathering the choices.
    """

    def local(gate_up, down, bias, x, logits):
        mine, own = jax.lax.axis_index("data") * logits.shape[0], logits.shape[0]
        count = own * logits.shape[1]
        x, logits = products.rows_of(x), gathered(logits)
        if isinstance(x, products.Quantised):
            # Scales come device by device and are read so: a collective of columns needs them turned.
            scale = jax.lax.all_gather(x.scale[:, :count], "data").swapaxes(0, 1)
            x = products.Quantised(gathered(x.values[:count]), scale.reshape(scale.shape[0], -1))
        else:
            x = gathered(x)
        r = choose(cfg, bias, logits.reshape(-1, logits.shape[-1]), kernels)
        first = jax.lax.axis_index(("data", "model")) * down.shape[0]
        part = sparse(gate_up, down, x, r, kernels, mesh.size, first)
        part = jax.lax.psum(part.reshape(*logits.shape[:2], -1), "model")
        r = _shaped(r, part)
        chosen = (jax.lax.dynamic_slice_in_dim(a, mine, own) for a in (r.ids, r.weights))
        return jax.lax.psum_scatter(part, "data", tiled=True), *chosen

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "data", tiled=True)

    experts, slots = PartitionSpec(("data", "model")), PartitionSpec("data")
    given, of_x = _operand(p.gate_up, p.down, x, kernels)
    in_specs = (experts, experts, PartitionSpec(), of_x, slots)
    run = sharded(local, mesh, in_specs, (slots, slots, slots))
    y, ids, weights = run(p.gate_up, p.down, p.bias, given, logits)
    return y, Routing(ids, weights)


def _operand(gate_up: Weight, down: Weight, x: products.Input, kernels: Kernels) -> tuple[Any, Any]:
    """Activations of the experts, quantised if they take them so, and how a mesh splits them."""
    whole = products.plain(x)
    quantised = ops.experts_take_quantised(kernels, whole.dtype, gate_up, down)
    return products.operand(x if quantised else whole)


def takes_quantised(p: Moe, dtype: Any, *, mesh: Mesh | None, kernels: Kernels) -> tuple[bool, ...]:
    """Whether the router, the experts and the shared expert take a block's input quantised."""
    experts = ops.experts_take_quantised(kernels, dtype, p.gate_up, p.down)
    if p.shared is None:
        return False, experts
    return False, experts, products.mlp_takes_quantised(p.shared, dtype, kernels=kernels, mesh=mesh)


def moe(
    p: Moe,
    cfg: ModelConfig,
    x: products.Input,
    *,
    experts: Experts,
    mesh: Mesh | None,
    kernels: Kernels = AUTO,
) -> tuple[tuple[Float[Array, "B W D"], ...], Routing]:
    """Returns (the result of the routed experts and that of the shared expert, to be added; routing)."""
    with jax.named_scope("moe_route"):
        whole = products.plain(x)
        logits = router_logits(p, whole)
    if mesh is not None:
        with jax.named_scope("moe_experts"):
            y, r = expert_parallel(p, cfg, x, logits, mesh, kernels)
    else:
        rows = whole.reshape(-1, whole.shape[-1])
        with jax.named_scope("moe_route"):
            r = choose(cfg, p.bias, logits.reshape(rows.shape[0], -1), kernels)
        with jax.named_scope("moe_experts"):
            if experts == "dense":
                if kernels.experts == "mosaic_gpu":
                    raise ConfigError(
                        "experts = 'dense' has no kernel; use 'sparse', or kernels.experts = 'xla'"
                    )
                y = dense(p.gate_up, p.down, rows, r)
            else:
                given, _ = _operand(p.gate_up, p.down, x, kernels)
                y = sparse(p.gate_up, p.down, products.rows_of(given), r, kernels)
        y, r = y.reshape(x.shape), _shaped(r, whole)
    y = constrain(y, mesh, "slots", None, None)
    if p.shared is None:
        return (y,), r
    with jax.named_scope("moe_shared"):
        shared = products.mlp(x, p.shared, kernels=kernels, mesh=mesh)
    # Added here, one collective sums both over ``model``.
    return ((y + shared,) if ways("heads", mesh) > 1 else (y, shared)), r
