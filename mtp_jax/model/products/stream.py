"""The residual stream in the form of the backend with kernels, between two stages."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Stream(NamedTuple):
    """The residual stream, and the last block's output, still to be added: a norm adds for nothing.

    Attributes:
        x: [B, W, D].
        added: [B, W, D], or float32 parts [s, B, W, D] to be summed.
    """

    x: Float[Array, "B W D"]
    added: tuple[Float[Array, "..."], ...]


def stream(x: Any) -> Stream:
    """A ``Stream`` of an array, at the first stage, or of a ``Stream`` as it is."""
    return x if isinstance(x, Stream) else Stream(x, ())


def summed(x: Float[Array, "*s B W D"]) -> Float[Array, "B W D"]:
    """The sum of the parts that a product may leave."""
    return x.sum(axis=0).astype(jnp.bfloat16) if x.ndim == 4 else x


def plus(x: Float[Array, "B W D"], added: Sequence[Float[Array, "..."]]) -> Float[Array, "B W D"]:
    """The sum of x and its addend."""
    return x + functools.reduce(jnp.add, map(summed, added)) if added else x
