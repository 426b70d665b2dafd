"""Rows in e4m3 for the kernels that multiply them, and the way in which a mesh splits them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels_pallas.quantised import Quantised
from mtp_jax.model.narrow import Fp4, Fp8, Narrow
from mtp_jax.model.products.plain import Split
from mtp_jax.model.sharding import partition, ways


@struct.dataclass
class HopperRows:
    """Activations, plain and quantised, for the products that read them.

    Attributes:
        shape: (B, W, D).
        plain: the rows as they are; None if every reader takes e4m3.
        quantised: e4m3 rows of each device: its own B * W, then padding that fills tiles; None if no product
            takes e4m3.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    plain: Float[Array, "B W D"] | None
    quantised: Quantised | None


@struct.dataclass
class Operand:
    """Rows for a kernel or for experts, of all devices or, in ``shard_map``, of one.

    Attributes:
        values: [B, W, D]; in e4m3 [T, D], see ``HopperRows.quantised``.
        scale: float32 [D / 128, T] of rows in e4m3, else None.
    """

    values: Float[Array, "*b D"]
    scale: Float[Array, "k T"] | None = None

    def split(self, inner: str | None = None) -> "Operand":
        """The PartitionSpec of each array. inner: logical axis of the features."""
        if self.scale is None:
            return Operand(partition("slots", None, inner))  # pyright: ignore[reportArgumentType]
        rows = of_rows(inner)
        return Operand(rows.values, rows.scale)

    def flat(self) -> Float[Array, "T D"] | Quantised:
        """The rows along one axis, as kernels take them."""
        if self.scale is None:
            return self.values.reshape(-1, self.values.shape[-1])
        return Quantised(self.values, self.scale)

    def rows_first(self, count: int) -> tuple[Array, ...]:
        """The first ``count`` rows as arrays with rows first: scales are transposed."""
        values = self.values.reshape(-1, self.values.shape[-1])[:count]
        return (values,) if self.scale is None else (values, self.scale[:, :count].T)

    @staticmethod
    def of_rows_first(values: Array, scale: Array | None = None) -> "Operand":
        """Undoes ``rows_first``."""
        return Operand(values, None if scale is None else scale.T)

    def gathered(self, count: int) -> "Operand":
        """The first ``count`` rows of every data shard.

        Scales are gathered device by device: a tiled gather needs them transposed.
        """
        values, *_ = self.rows_first(count)
        values = jax.lax.all_gather(values, "data", tiled=True)
        if self.scale is None:
            return Operand(values)
        scale = jax.lax.all_gather(self.scale[:, :count], "data").swapaxes(0, 1)
        return Operand(values, scale.reshape(scale.shape[0], -1))


def plain(x: Any) -> Float[Array, "B W D"]:
    """Rows of a product that does not take them quantised."""
    whole = x.plain if isinstance(x, HopperRows) else x
    assert whole is not None, "a product reads rows that were made for others"
    return whole


def dtype_of(x: Any) -> Any:
    """The dtype of the rows before they were quantised."""
    return jnp.bfloat16 if isinstance(x, HopperRows) and x.plain is None else plain(x).dtype


def operand(x: Any) -> Operand:
    """Rows for a product by a kernel: the quantised rows, if there are any."""
    if isinstance(x, HopperRows) and x.quantised is not None:
        return Operand(x.quantised.values, x.quantised.scale)
    return Operand(plain(x))


def of_rows(inner: str | None = None) -> Any:
    """The PartitionSpecs of ``Quantised`` rows, which are split by slots and perhaps by features."""
    specs: Any = partition("slots", inner), partition(inner, "slots")
    return Quantised(specs[0], specs[1])


def arrays(w: Any) -> tuple[Any, Any]:
    """A weight as kernels take it: values or codes, and scales of an FP8 or FP4 one.

    Raises ValueError for a weight that is narrow in another way.
    """
    if isinstance(w, Fp4):
        return w.codes, w.exponents
    if isinstance(w, Narrow) and not isinstance(w, Fp8):
        raise ValueError(f"kernels on mosaic_gpu: weights are {type(w).__name__}, must be FP8, FP4 or arrays")
    return (w.values, w.scale) if isinstance(w, Fp8) else (w, None)


def axes_of(w: Fp8, split: Split | None) -> tuple[str | None, ...]:
    """Logical axes of a weight."""
    out, inner = "heads" if split == "out" else None, "heads" if split == "in" else None
    return (out, *(None,) * (len(w.shape) - 2), inner)


def part(x: Any, mesh: Mesh | None, *axes: str | None) -> jax.ShapeDtypeStruct:
    """Shape of one device's part of an array with these logical axes; other axes are not split."""
    parts = [ways(axis, mesh) for axis in axes] + [1] * (len(x.shape) - len(axes))
    return jax.ShapeDtypeStruct(tuple(n // p for n, p in zip(x.shape, parts, strict=True)), x.dtype)
