"""Times of an operation on the device, launches included: with a cold cache, and one call after the other."""

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from kernels_pallas.check.case import CaseInputs, Operation

# Calls per measurement: one launch of a program costs the host more than a small kernel takes.
CALLS = 10
MEASUREMENTS = 7
# Calls of a chain: 400 of 2 us are 40 times the error of the host's clock.
CHAIN = 400
# Seconds for which calls run while the clock is read; nvidia-smi takes a tenth of one to start.
BUSY = 0.5
# The parts of a program that XLA makes one graph: loops, too, which it leaves out by itself.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
}
# The number of float32 values with twice the bytes of an H200's second-level cache.
FLUSH = (2 * 50 * 2**20) // 4


def seconds(function: Operation, inputs: CaseInputs) -> float:
    """Median time of one call."""
    flush = jnp.zeros(FLUSH, jnp.float32)
    both, alone = jax.jit(repeated(function)), jax.jit(repeated(_nothing))
    return (median(both, inputs, flush) - median(alone, inputs, flush)) / CALLS


@dataclass(frozen=True)
class Hot:
    """An operation called again and again, its inputs where the call before left them.

    Attributes:
        seconds: seconds of one call.
        clock: MHz of the multiprocessors meanwhile, and watts; None where nvidia-smi does not say.
    """

    seconds: float
    clock: tuple[float, float] | None


def hot(function: Operation, inputs: CaseInputs) -> Hot:
    """Measure a call in a chain of calls, one graph of launches, less the time of the loop itself."""

    def chain(function: Operation) -> tuple[jax.stages.Compiled, float]:
        run = jax.jit(partial(chained, function), compiler_options=GRAPHS).lower(inputs).compile()
        return run, median(run, inputs)

    (run, taken), (_, alone) = chain(function), chain(_nothing)
    running = [run(inputs) for _ in range(math.ceil(BUSY / taken))]
    clock = _clock()
    jax.block_until_ready(running)
    return Hot((taken - alone) / CHAIN, clock)


def chained(function: Operation, inputs: CaseInputs) -> jax.Array:
    """A program of `CHAIN` calls, each of which waits for the call before."""

    def call(_: jax.Array, seen: jax.Array) -> jax.Array:
        given, seen = lax.optimization_barrier((inputs, seen))
        first = jax.tree.leaves(lax.optimization_barrier(function(*given)))[0]
        return seen + first.reshape(-1)[0].astype(jnp.float32) * 0

    return lax.fori_loop(0, CHAIN, call, jnp.float32(0))


def _clock() -> tuple[float, float] | None:
    """MHz and watts of the first GPU now."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ask = [tool, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
    try:
        megahertz, watts = map(float, said[0].split(","))
    except (IndexError, ValueError):
        return None
    return megahertz, watts


def external_seconds(call: Callable[[], object]) -> float:
    """Median time of one call of a torch or Triton kernel, by Triton's timer, with a cold cache."""
    return import_module("triton.testing").do_bench(call, return_mode="median") / 1e3


def _nothing(*inputs: PyTree) -> CaseInputs:
    return inputs


def repeated(function: Operation) -> Callable[[CaseInputs, jax.Array], jax.Array]:
    """A program of `CALLS` calls, one after the other, each after the cache has been overwritten."""

    def program(inputs: CaseInputs, flush: jax.Array) -> jax.Array:
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
