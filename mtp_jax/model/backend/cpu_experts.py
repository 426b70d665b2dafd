"""Experts of few rows as XLA on a CPU does them fast: all pairs of a row and an expert at once."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.moe import Routing

# ``by_pair`` wins up to so many pairs per expert: of experts that fit a core's cache, or of larger.
_PAIRS_CACHED, _PAIRS = 16, 4
_CACHE_BYTES = 1 << 20
# It sums slices of the input features: a vector register's worth of them, or as many as give no more slices.
_LANES, _SLICES = 16, 64


def by_pair(
    gate_up: Float[Array, "E 2 i D"], down: Float[Array, "E D i"], x: Float[Array, "T D"], r: Routing
) -> Float[Array, "T D"]:
    """Multiply each row with each of its experts apart, all pairs at once: for few rows per expert.

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


def most_pairs(gate_up: Float[Array, "E 2 i D"], down: Float[Array, "E D i"]) -> int:
    """How many pairs ``by_pair`` is the faster way for."""
    experts = down.shape[0]
    cached = gate_up.nbytes + down.nbytes <= experts * _CACHE_BYTES
    return experts * (_PAIRS_CACHED if cached else _PAIRS)
