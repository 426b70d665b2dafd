"""Time of an operation on the device, launches included, with none of its inputs in the cache."""

import statistics
import time
from collections.abc import Callable
from importlib import import_module

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from kernels_pallas.checking.case import Inputs, Operation

# Calls per measurement: one launch of a program costs the host more than a small kernel takes.
CALLS = 10
MEASUREMENTS = 7
# The number of float32 values with twice the bytes of an H200's second-level cache.
FLUSH = (2 * 50 * 2**20) // 4


def seconds(function: Operation, inputs: Inputs) -> float:
    """Median time of one call."""
    flush = jnp.zeros(FLUSH, jnp.float32)
    both, alone = jax.jit(repeated(function)), jax.jit(repeated(_nothing))
    return (median(both, inputs, flush) - median(alone, inputs, flush)) / CALLS


def external_seconds(call: Callable[[], object]) -> float:
    """Median time of one call of a torch or Triton kernel, by Triton's timer, with a cold cache."""
    return import_module("triton.testing").do_bench(call, return_mode="median") / 1e3


def _nothing(*inputs: PyTree) -> Inputs:
    return inputs


def repeated(function: Operation) -> Callable[[Inputs, jax.Array], jax.Array]:
    """A program of `CALLS` calls, one after the other, each after the cache has been overwritten."""

    def program(inputs: Inputs, flush: jax.Array) -> jax.Array:
        def call(_: jax.Array, flush: jax.Array) -> jax.Array:
            # The barriers have a call wait until the cache is overwritten, and that wait for all of the call.
            given, flush = lax.optimization_barrier((inputs, flush))
            out = lax.optimization_barrier(function(*given))
            first = jax.tree.leaves(out)[0]
            return flush + first.reshape(-1)[0].astype(jnp.float32)

        return lax.fori_loop(0, CALLS, call, flush)

    return program


def median(program: Operation, *arguments: PyTree) -> float:
    """Seconds that the program takes."""
    jax.block_until_ready(program(*arguments))
    found = []
    for _ in range(MEASUREMENTS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        found.append(time.perf_counter() - start)
    return statistics.median(found)
