"""Products with a matrix of each head, an array or narrow in memory, as XLA on a CPU does them fast."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.backend import cpu_lanes
from mtp_jax.model.backend.cpu_products import BLOCK, LANED
from mtp_jax.model.narrow import ByHead, Narrow, expand, index


def inward(x: Float[Array, "N T o"], w: ByHead) -> Float[Array, "N T i"]:
    """``x[n] @ w[n]``. Loops over lanes do not pay: the rows of a weight lie across its outputs."""
    return _widened(x, w, 1) if isinstance(w, Narrow) else _dots(x, w, 1)


def outward(x: Float[Array, "N T i"], w: ByHead) -> Float[Array, "N T o"]:
    """``x[n] @ w[n].T``."""
    if not isinstance(w, Narrow):
        return _dots(x, w, 2)
    return cpu_lanes.by_head(x, w) if x.shape[1] <= LANED else _widened(x, w, 2)


def _dots(x: Float[Array, "N T a"], w: Float[Array, "N o i"], contracted: int) -> Float[Array, "N T b"]:
    dims = (((2,), (contracted,)), ((0,), (0,)))
    return jax.lax.optimization_barrier(jax.lax.dot_general(jax.lax.optimization_barrier(x), w, dims))


def _widened(x: Float[Array, "N T a"], w: Narrow, contracted: int) -> Float[Array, "N T b"]:
    """Widens a few heads' matrices at a time, which the product then reads from a core's cache."""
    heads, size = len(x), math.prod(w.shape[1:])
    each = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or n * size <= BLOCK))

    def product(x: Array, w: ByHead) -> Array:
        return _dots(x, jax.lax.optimization_barrier(expand(w, x.dtype)), contracted)

    if each == heads:
        return product(x, w)
    blocks = w.reshape(-1, each, *w.shape[1:])

    def one(i: Int[Array, ""], out: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(x, i * each, each)
        return jax.lax.dynamic_update_slice_in_dim(out, product(own, index(blocks, i)), i * each, axis=0)

    empty = jnp.zeros((*x.shape[:2], w.shape[3 - contracted]), x.dtype)
    return jax.lax.fori_loop(0, heads // each, one, empty)
