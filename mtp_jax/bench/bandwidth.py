"""How fast this computer copies memory: what a step that only read its weights would be bound by."""

import time

import jax
import jax.numpy as jnp

_REPEATS = 20


def of_copies(nbytes: float) -> float:
    """Bytes per second, read and written, by which so many bytes are copied; the best of several copies.

    As many bytes as a step reads, so that they lie in the memory, or the cache, that the step's lie in.
    """
    source = jnp.ones(max(int(nbytes) // 4, 1), jnp.float32)
    # With its sign changed: a plain copy would take one core.
    copy = jax.jit(jnp.negative).lower(source).compile()

    def seconds() -> float:
        began = time.perf_counter()
        jax.block_until_ready(copy(source))
        return time.perf_counter() - began

    return 2 * source.nbytes / min(seconds() for _ in range(_REPEATS))
