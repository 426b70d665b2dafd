"""Run layers of DeepSeek-V3's dimensions on a Hopper GPU: kernels against XLA's way, and the time of a layer.

    python -m tests.kernels.run_layers [--slots N] [--rows N] [--experts N] [--layers N] [--no-xla] [--sparse]

Random weights, FP8 as the release has them; a window of 4 at the end of each slot's rows. A layer's time is
that of several layers less that of one. Its floor is the weights that its tokens touch, and its slots' rows,
over the memory's bandwidth, from the data sheet. A layer of the release is 11.6 GB.
"""

import argparse
import functools
import statistics
import sys
import time
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from kernels_pallas.checking.device import rates
from kernels_pallas.checking.verify import distance
from mtp_jax.model.backend import backend
from mtp_jax.model.backend.stream import plus, stream
from mtp_jax.model.narrow import Fp8
from mtp_jax.model.sharding import make_mesh
from tests.kernels.compile_step import DEPTH, INDEXER, Load, layers_of

Way = Literal["auto", "xla"]
# Calls in a row, which the host does not wait for, and how often they are measured.
CALLS, MEASUREMENTS = 10, 5


def random_like(key: jax.Array, shape: Any, *, gain: float = 1.0) -> jax.Array:
    """Random numbers whose products keep their inputs' size; near 1 for the gain of a norm."""
    *stack, rows, columns = (1, 1, *shape.shape)[-max(2, len(shape.shape)) :]

    def matrix(key: jax.Array) -> jax.Array:
        scale = gain if shape.dtype == jnp.float8_e4m3fn else gain / columns**0.5
        values = jax.random.normal(key, (rows, columns), jnp.float32) * scale
        return (values if len(shape.shape) > 1 else 1 + 0.02 * values).astype(shape.dtype)

    @jax.jit
    def array(key: jax.Array) -> jax.Array:
        # One matrix at a time: a layer's experts are 15 GB in float32.
        count = functools.reduce(lambda a, b: a * b, stack, 1)
        return jax.lax.map(matrix, jax.random.split(key, count)).reshape(shape.shape)

    return array(key)


def random_params(key: jax.Array, shapes: Any) -> Any:
    """Of each parameter: FP8 values with scales of one size, or random numbers."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, Fp8))

    def of(key: jax.Array, leaf: Any) -> Any:
        if isinstance(leaf, Fp8):
            scale = jnp.full(leaf.scale.shape, leaf.shape[-1] ** -0.5, jnp.float32)
            return Fp8(random_like(key, leaf.values), scale)
        return random_like(key, leaf)

    return tree.unflatten(
        [of(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)]
    )


def run(
    load: Load, layers: int, kernels: Way, key: jax.Array, *, timed: bool = True
) -> tuple[jax.Array, float]:
    """What the layers add to their inputs, and the median seconds of a call; 0 if it is not timed."""
    function, shapes = layers_of(make_mesh(1, 1), layers, backend(kernels), load=load)
    compiled = function.lower(*shapes).compile()
    params, x, positions, table, pages = shapes
    keys = jax.random.split(key, 3)
    weights = random_params(keys[0], params)
    given = jax.random.normal(keys[1], x.shape, x.dtype)
    at = jnp.broadcast_to(jnp.arange(load.rows - DEPTH - 1, load.rows), positions.shape).astype(jnp.int32)
    # Page 0 belongs to no slot.
    columns = 1 + jnp.arange(table.shape[0] * table.shape[1], dtype=jnp.int32).reshape(table.shape)
    cache = jax.tree.map(lambda p: jax.random.normal(keys[2], p.shape, p.dtype), pages)
    out, cache = compiled(weights, given, at, columns, tuple(cache))
    x, parts = stream(out)
    added = (plus(x, parts).astype(jnp.float32) - given.astype(jnp.float32)).block_until_ready()
    times = []
    for _ in range(MEASUREMENTS if timed else 0):
        started = time.perf_counter()
        for _ in range(CALLS):
            out, cache = compiled(weights, given, at, columns, tuple(cache))
        jax.block_until_ready(out)
        times.append((time.perf_counter() - started) / CALLS)
    return added, statistics.median(times or [0.0])


def touched(load: Load, layer: Any) -> float:
    """Bytes that a layer has to read: experts that independent tokens choose, other weights, the cache."""
    tokens = load.slots * (DEPTH + 1)
    share = 1 - (1 - 8 / load.experts) ** tokens
    total = 0.0
    for leaf in jax.tree.leaves(layer):
        routed = leaf.shape[0] == load.experts and leaf.ndim > 2
        total += leaf.size * leaf.dtype.itemsize * (share if routed else 1)
    return total + load.slots * load.rows * 576 * 2


def main() -> int:
    """Run; 1 if what is computed is not finite, or further from XLA's way than quantising explains."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.run_layers", description=__doc__)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=256, help="fewer spare memory for XLA's way")
    parser.add_argument("--layers", type=int, default=2, help="2 or more give the time of a layer")
    parser.add_argument("--no-xla", action="store_true", help="only the kernels")
    parser.add_argument("--sparse", action="store_true", help="with DeepSeek-V3.2's indexer")
    options = parser.parse_args()
    indexer = INDEXER if options.sparse else None
    load = Load(options.slots, options.rows, indexer, ("one",), options.experts)
    key, kind = jax.random.key(0), jax.devices()[0].device_kind
    peak = rates(kind)
    if peak is None:
        print(f"needs a Hopper GPU; found {kind}", file=sys.stderr)
        return 2
    outs, ways = {}, get_args(Way)
    for kernels in ways[:1] if options.no_xla else ways:
        outs[kernels], one = run(load, 1, kernels, key)
        print(f"{kernels}: one layer {one * 1e6:.0f} us", flush=True)
        if options.layers > 1:
            _, several = run(load, options.layers, kernels, key)
            each = (several - one) / (options.layers - 1) * 1e6
            print(
                f"{kernels}: {options.layers} layers {several * 1e6:.0f} us: a layer {each:.0f} us",
                flush=True,
            )
    (layer, *_), *_ = layers_of(make_mesh(1, 1), 1, backend("xla"), load=load)[1]
    print(f"floor of a layer: {touched(load, layer) / peak.bandwidth * 1e6:.0f} us")
    if not jnp.isfinite(outs["auto"]).all():
        print("NOT FINITE")
        return 1
    if options.no_xla:
        return 0
    # Kernels quantise activations: 2.5 % of a product's norm, 4.4 % of a SwiGLU layer's (docs/kernels.md).
    apart = distance(outs["auto"], outs["xla"])
    print(f"distance of what a layer adds: {apart:.2e}{' WRONG' * (not apart < 0.1)}")
    return int(not apart < 0.1)


if __name__ == "__main__":
    sys.exit(main())
