"""Activations for products with FP8 weights: e4m3 values, and a scale for each block of a row."""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

BLOCK = 128
FP8_MAX = 448.0
TINY = 1e-10


@struct.dataclass
class Quantised:
    """Rows in e4m3 with scales of 1x128 blocks (arXiv 2412.19437, section 3.3.2).

    Attributes:
        values: e4m3 [M, K].
        scale: float32 [K / 128, M]: scales of a block number lie side by side for neighbouring rows.
    """

    values: Float[Array, "M K"]
    scale: Float[Array, "k M"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[M, K]."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    def expand(self) -> Float[Array, "M K"]:
        """Values times scales, float32."""
        return self.values.astype(jnp.float32) * jnp.repeat(self.scale.T, BLOCK, axis=-1)

    def padded(self, rows: int) -> "Quantised":
        """The rows, with zeros up to a multiple of ``rows`` rows."""
        more = -self.shape[0] % rows
        if not more:
            return self
        return Quantised(jnp.pad(self.values, ((0, more), (0, 0))), jnp.pad(self.scale, ((0, 0), (0, more))))


def whole_tiles(rows: int) -> int:
    """Rows of the tiles that a product of ``rows`` rows is cut into."""
    tile = 64 if rows <= 64 else 128
    return -(-rows // tile) * tile


def quantise(x: Float[Array, "M K"]) -> Quantised:
    """A block's largest magnitude becomes 448, the largest e4m3 number. K must be a multiple of 128."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, BLOCK)
    scale = jnp.maximum(jnp.abs(blocks).max(axis=-1), TINY) * (1 / FP8_MAX)
    values = (blocks * (1 / scale)[..., None]).astype(jnp.float8_e4m3fn)
    return Quantised(values.reshape(x.shape), scale.T)
