"""The residual stream in the form of the backend with kernels, between two stages."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels_pallas.weighed import Weighed
from mtp_jax.model.hyper import Entered
from mtp_jax.model.sharding import ways


@struct.dataclass
class Parts:
    """The result of a product, as a kernel leaves it to the kernel that reads it.

    Attributes:
        values: parts to be summed, float32, or one in bfloat16. Each device has its own B * W rows first,
            then rows that fill tiles and hold anything.
        shape: (B, W, D).
        shards: number of devices that the rows are split over.
    """

    values: Float[Array, "s M D"]
    shape: tuple[int, int, int] = struct.field(pytree_node=False)
    shards: int = struct.field(pytree_node=False)

    @property
    def dtype(self) -> Any:
        """The dtype of the sum."""
        return jnp.bfloat16

    def summed(self) -> Float[Array, "B W D"]:
        """The sum of the parts."""
        count, _, width = self.values.shape
        rows = self.shape[0] * self.shape[1] // self.shards
        own = self.values.reshape(count, self.shards, -1, width)[:, :, :rows].reshape(count, *self.shape)
        return own[0] if count == 1 else own.sum(axis=0).astype(self.dtype)


ProductResult = Float[Array, "B W D"] | Parts | Weighed
"""The result of a product, or of experts."""


class PendingResidual(NamedTuple):
    """The residual stream, and the last block's output, still to be added: a norm adds for nothing.

    Attributes:
        x: [B, W, D].
        added: results of products.
    """

    x: ProductResult
    added: tuple[ProductResult, ...]


class PendingStreams(NamedTuple):
    """Several residual streams before the result of a sublayer is added: the next product adds for nothing.

    Attributes:
        entered: the streams while the sublayer ran.
        results: addends of the sublayer's result.
    """

    entered: Entered
    results: tuple[ProductResult, ...]


def stream(x: Any) -> PendingResidual:
    """A ``PendingResidual`` of an array, at the first stage, or of a ``PendingResidual`` as it is."""
    return x if isinstance(x, PendingResidual) else PendingResidual(x, ())


def parts(x: ProductResult, mesh: Mesh | None) -> Parts:
    """``Parts`` as they are; an array as one part."""
    assert not isinstance(x, Weighed), "experts' results are no parts"
    if isinstance(x, Parts):
        return x
    slots, window, width = x.shape
    return Parts(x.reshape(1, slots * window, width), (slots, window, width), ways("slots", mesh))


def summed(x: ProductResult) -> Float[Array, "B W D"]:
    """Turns the result into an array."""
    return x.summed() if isinstance(x, Parts | Weighed) else x


def plus(x: ProductResult, added: Sequence[ProductResult]) -> Float[Array, "B W D"]:
    """The sum of x and its addends."""
    return functools.reduce(jnp.add, map(summed, added), summed(x))
