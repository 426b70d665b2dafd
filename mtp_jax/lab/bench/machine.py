"""Peaks of this machine: the two lines of the roofline, by measurement."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

_REPEATS = 20
_MATRIX = 2048
_BYTES = 1 << 28


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of a large matrix product and bytes/s read by a large sum, in ``dtype``, best of several."""

    flops: float
    bandwidth: float
    dtype: str

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time this work can take: the slower of arithmetic and memory."""
        return max(flops / self.flops, nbytes / self.bandwidth)


def measure(dtype: str) -> Peaks:
    """Measure the peaks, for some seconds."""
    square = jnp.ones((_MATRIX, _MATRIX), dtype)
    long = jnp.ones(_BYTES // square.dtype.itemsize, dtype)
    product = jax.jit(lambda a: a @ a).lower(square).compile()
    total = jax.jit(lambda a: a.sum(dtype=jnp.float32)).lower(long).compile()
    return Peaks(2 * _MATRIX**3 / _best(product, square), _BYTES / _best(total, long), dtype)


def copy_bandwidth(nbytes: float) -> float:
    """Bytes per second, read and written, at which ``nbytes`` bytes are copied; the best of several copies.

    ``nbytes`` is the size that a step reads, so that the copy lies in the same memory, or cache, as its
    weights.
    """
    source = jnp.ones(max(int(nbytes) // 4, 1), jnp.float32)
    # The copy changes the sign: a plain copy would take one core.
    copy = jax.jit(jnp.negative).lower(source).compile()
    return 2 * source.nbytes / _best(copy, source)


def _best(run: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(argument))
        return time.perf_counter() - began

    return min(once() for _ in range(_REPEATS))
