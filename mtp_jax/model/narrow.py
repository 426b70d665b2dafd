"""Weights that stay in memory as the checkpoint stores them, narrower than they are multiplied.

Such a weight stands in the tree where its array would. It is a tree of arrays itself, of which the leading
dimensions are the weight's own: an expert is indexed, and a mesh splits experts, as they are of an array.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.model.hf_quantization import FP8_BLOCK, INT4_PER_WORD


class Narrow(ABC):
    """What every such weight has."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @abstractmethod
    def expand(self, dtype: Any) -> Float[Array, "*o i"]:
        """The weight as loading it dequantised gives: products in float32, rounded to ``dtype`` once."""

    @abstractmethod
    def reshape(self, *shape: int) -> "Narrow":
        """The same matrices, their rows or columns grouped differently."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8(Narrow):
    """Block-scaled FP8 (arXiv 2412.19437, section 3.3).

    Attributes:
        values: float8_e4m3fn, of the parameter's shape.
        scale: float32, one for each 128x128 block of the weight seen as the matrix of its checkpoint tensor,
            with the leading dimensions that stack such matrices.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.values.shape

    def expand(self, dtype: Any) -> Float[Array, "*o i"]:
        """Values times the scale of their block."""
        stacked = self.scale.shape[:-2]
        matrix = self.values.reshape(*stacked, -1, self.shape[-1])
        spread = jnp.repeat(jnp.repeat(self.scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
        spread = spread[..., : matrix.shape[-2], : matrix.shape[-1]]
        return (matrix.astype(jnp.float32) * spread).astype(dtype).reshape(self.shape)

    def reshape(self, *shape: int) -> "Fp8":
        """The same matrices, their rows or columns grouped differently."""
        return Fp8(self.values.reshape(*shape), self.scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4(Narrow):
    """Signed 4-bit values with a scale for each group of inputs, as compressed-tensors packs them.

    Attributes:
        words: int32 [*o, i / 8]: value j of a word is its bits 4 j to 4 j + 3, plus 8.
        scale: bfloat16, float16 or float32 [*o, i / group].
    """

    words: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return *self.words.shape[:-1], self.words.shape[-1] * INT4_PER_WORD

    def expand(self, dtype: Any) -> Float[Array, "*o i"]:
        """Values times the scale of their group."""
        shifts = jnp.arange(INT4_PER_WORD, dtype=jnp.int32) * (32 // INT4_PER_WORD)
        values = ((self.words[..., None] >> shifts) & 15) - 8
        grouped = values.reshape(*self.scale.shape, -1).astype(jnp.float32)
        spread = self.scale[..., None].astype(jnp.float32)
        return (grouped * spread).astype(dtype).reshape(self.shape)

    def reshape(self, *shape: int) -> "Int4":
        """The same rows, grouped differently; whole inputs stay last."""
        rows = shape[:-1]
        return Int4(
            self.words.reshape(*rows, self.words.shape[-1]), self.scale.reshape(*rows, self.scale.shape[-1])
        )


def is_narrow(x: Any) -> bool:
    """Whether this is a weight and no array: a leaf, where trees of weights are walked."""
    return isinstance(x, Narrow)


def expand(w: Float[Array, "*o i"] | Narrow, dtype: Any) -> Float[Array, "*o i"]:
    """A weight as an array: itself, or expanded."""
    return w.expand(dtype) if isinstance(w, Narrow) else w
