"""Run layers of DeepSeek-V3's dimensions on a Hopper GPU by kernels and by XLA, and compare what they add.

    python -m tests.kernels.run_layers [--slots N] [--rows N] [--experts N] [--layers N] [--sparse]

Random weights, FP8 as the release has them; a window of 4 at the end of each slot's rows.
"""

import argparse
import sys

import jax
import jax.numpy as jnp

from kernels_pallas.check.verify import distance
from mtp_jax.checkpoint.random_weights import random_params
from mtp_jax.lab.bench.shapes import INDEXER
from mtp_jax.model.backend import backend
from mtp_jax.model.choices import KernelChoice
from mtp_jax.model.device import is_hopper
from mtp_jax.model.products.stream import plus, stream
from mtp_jax.model.sharding import make_mesh
from tests.kernels.compile_step import Load, layers_of

# Kernels quantise activations: 2.5 % of a product's norm, 4.4 % of a SwiGLU layer's (docs/kernels.md).
MOST = 0.1


def run(load: Load, layers: int, kernels: KernelChoice, key: jax.Array) -> jax.Array:
    """What the layers add to their inputs."""
    function, shapes = layers_of(make_mesh(1, 1), layers, backend(kernels), load=load)
    params, x, positions, table, pages = shapes
    keys = jax.random.split(key, 3)
    given = jax.random.normal(keys[1], x.shape, x.dtype)
    at = jnp.broadcast_to(jnp.arange(load.rows - load.depth - 1, load.rows), positions.shape).astype(
        jnp.int32
    )
    # Page 0 belongs to no slot.
    columns = 1 + jnp.arange(table.shape[0] * table.shape[1], dtype=jnp.int32).reshape(table.shape)
    cache = jax.tree.map(lambda p: jax.random.normal(keys[2], p.shape, p.dtype), pages)
    out, _ = function(random_params(keys[0], params, load.experts), given, at, columns, tuple(cache))
    x, parts = stream(out)
    return (plus(x, parts).astype(jnp.float32) - given.astype(jnp.float32)).block_until_ready()


def main() -> int:
    """Run; 1 if what is computed is not finite, or further from XLA's way than quantising explains."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.run_layers", description=__doc__)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=32, help="few spare memory for XLA's way")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--sparse", action="store_true", help="with DeepSeek-V3.2's indexer")
    options = parser.parse_args()
    if not is_hopper():
        print(f"needs a Hopper GPU; found {jax.devices()[0].device_kind}", file=sys.stderr)
        return 2
    indexer = INDEXER if options.sparse else None
    load = Load(options.slots, options.rows, indexer, ("one",), options.experts)
    by_kernels, by_xla = (run(load, options.layers, k, jax.random.key(0)) for k in ("auto", "xla"))
    apart = distance(by_kernels, by_xla)
    print(f"distance of what the layers add: {apart:.2e}{' WRONG' * (not apart < MOST)}")
    return int(not apart < MOST)


if __name__ == "__main__":
    sys.exit(main())
