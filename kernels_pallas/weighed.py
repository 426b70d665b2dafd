"""Results of experts, which the kernel that reads them weighs and sums."""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Weighed:
    """A sum of chosen rows for each token, still to be made.

    Attributes:
        rows: results of experts, bfloat16.
        place: row of each of a token's experts, int32; M or more where there is none.
        weights: float32, as the router writes them.
        shape: shape of the sum, D last.
    """

    rows: Float[Array, "M *D"]
    place: Int[Array, "k T"]
    weights: Float[Array, "k T"]
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the sum."""
        return self.rows.dtype

    def reshape(self, shape: tuple[int, ...]) -> "Weighed":
        """The same sums in another shape."""
        return replace(self, shape=shape)

    def total(self) -> Float[Array, "T D"]:
        """The sums in float32, written choice by choice: XLA needs one launch for them."""
        count = self.rows.shape[0]
        total = jnp.zeros((self.place.shape[1], self.rows.shape[1]), jnp.float32)
        for place, weights in zip(self.place, self.weights, strict=True):
            # Rows of no token may hold NaN, which a zero weight would not silence.
            part = self.rows.at[place].get(mode="clip", wrap_negative_indices=False).astype(jnp.float32)
            total += jnp.where((place < count)[:, None], part * weights[:, None], 0)
        return total

    def summed(self) -> Float[Array, "..."]:
        """The sums in bfloat16."""
        return self.total().astype(jnp.bfloat16).reshape(self.shape)
