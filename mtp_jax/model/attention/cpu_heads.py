"""Products with a matrix of each head, an array or a narrow weight, in forms that are fast on a CPU."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.narrow import ByHead, Narrow, expand, index, readable
from mtp_jax.model.products import cpu_lanes
from mtp_jax.model.products.cpu import BLOCK, LANED


def inward(x: Float[Array, "N T o"], w: ByHead) -> Float[Array, "N T i"]:
    """``x[n] @ w[n]``."""
    fixed = jax.lax.optimization_barrier
    return fixed(_product(fixed(x), w, 1))


def outward(x: Float[Array, "N T i"], w: ByHead) -> Float[Array, "N T o"]:
    """``x[n] @ w[n].T``: of few rows by loops that widen in registers, as their sums run along the weight."""
    if readable(w) and x.dtype == jnp.float32 and x.shape[1] <= LANED:
        return cpu_lanes.product_by_head(x, w)
    return _product(x, w, 2)


def _product(x: Float[Array, "N T a"], w: ByHead, contracted: int) -> Float[Array, "N T b"]:
    """Narrow matrices are widened a few heads at a time; the product reads them from a cache."""
    if not isinstance(w, Narrow):
        return jax.lax.dot_general(x, w, (((2,), (contracted,)), ((0,), (0,))))
    heads, size = len(x), math.prod(w.shape[1:])
    each = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or n * size <= BLOCK))

    def widened(x: Array, w: ByHead) -> Array:
        return _product(x, jax.lax.optimization_barrier(expand(w, x.dtype)), contracted)

    if each == heads:
        return widened(x, w)
    blocks = w.by_groups(each)

    def one(i: Int[Array, ""], out: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(x, i * each, each)
        return jax.lax.dynamic_update_slice_in_dim(out, widened(own, index(blocks, i)), i * each, axis=0)

    empty = jnp.zeros((*x.shape[:2], w.shape[3 - contracted]), x.dtype)
    return jax.lax.fori_loop(0, heads // each, one, empty)
