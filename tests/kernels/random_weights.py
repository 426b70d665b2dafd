"""Parameters for measurements on a GPU: random, made there, with the sizes and types of a release."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax.model.narrow import Fp8


def random_params(key: jax.Array, shapes: Any) -> Any:
    """Of each parameter of a tree of shapes: FP8 values with scales of one size, or random numbers."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, Fp8))

    def of(key: jax.Array, leaf: Any) -> Any:
        if isinstance(leaf, Fp8):
            scale = jnp.full(leaf.scale.shape, leaf.shape[-1] ** -0.5, jnp.float32)
            return Fp8(random_like(key, leaf.values), scale)
        return random_like(key, leaf)

    return tree.unflatten(
        [of(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)]
    )


def random_like(key: jax.Array, shape: Any) -> jax.Array:
    """Random numbers whose products keep their inputs' size; near 1 for the gain of a norm."""
    return _maker(shape.shape, jnp.dtype(shape.dtype))(key)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """One program for all arrays of a shape: 61 layers have a thousand arrays."""
    *stack, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]

    def matrix(key: jax.Array) -> jax.Array:
        scale = 1 if dtype == jnp.float8_e4m3fn else columns**-0.5
        values = jax.random.normal(key, (rows, columns), jnp.float32) * scale
        return (values if len(shape) > 1 else 1 + 0.02 * values).astype(dtype)

    def array(key: jax.Array) -> jax.Array:
        # One matrix at a time: a layer's experts are 15 GB in float32.
        return jax.lax.map(matrix, jax.random.split(key, math.prod(stack))).reshape(shape)

    return jax.jit(array)
