"""Rows in e4m3 on their way to the kernels that multiply them, and how a mesh splits both."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.quantised import Quantised
from mtp_jax.model.backend.xla_experts import Split
from mtp_jax.model.narrow import Fp8, Narrow
from mtp_jax.model.sharding import partition, ways


@dataclass(frozen=True)
class Rows:
    """Activations as the products that read them take them.

    Attributes:
        shape: (B, W, D).
        plain: None if no product takes them so.
        quantised: rows of each device, its own B * W first, then more that fill tiles; None if no product
            takes them.
    """

    shape: tuple[int, ...]
    plain: Float[Array, "B W D"] | None
    quantised: Quantised | None


def plain(x: Any) -> Float[Array, "B W D"]:
    """Rows of a product that does not take them quantised."""
    whole = x.plain if isinstance(x, Rows) else x
    assert whole is not None, "a product reads rows that were made for others"
    return whole


def dtype_of(x: Any) -> Any:
    """The dtype of the rows, from before they were quantised."""
    return jnp.bfloat16 if isinstance(x, Rows) and x.plain is None else plain(x).dtype


def operand(x: Any, inner: str | None = None) -> tuple[Any, Any]:
    """Rows for a product with a kernel, quantised if they are, and how a mesh splits them."""
    if isinstance(x, Rows) and x.quantised is not None:
        return (x.quantised.values, x.quantised.scale), of_rows(inner)
    return plain(x), partition("slots", None, inner)


def of_rows(inner: str | None = None) -> tuple[Any, Any]:
    """How quantised rows are split: slots, and perhaps features."""
    return partition("slots", inner), partition(inner, "slots")


def flat(given: Any) -> Float[Array, "T D"] | Quantised:
    """A device's part of an operand, row by row."""
    return Quantised(*given) if isinstance(given, tuple) else given.reshape(-1, given.shape[-1])


def arrays(w: Any) -> tuple[Any, Any]:
    """A weight as kernels take it: values, and scales of an FP8 one.

    Raises ValueError for a weight that is narrow in another way.
    """
    if isinstance(w, Narrow) and not isinstance(w, Fp8):
        raise ValueError(f"kernels on mosaic_gpu: weights are {type(w).__name__}, must be FP8 or arrays")
    return (w.values, w.scale) if isinstance(w, Fp8) else (w, None)


def axes_of(w: Fp8, split: Split | None) -> tuple[str | None, ...]:
    """Logical axes of a weight."""
    out, inner = "heads" if split == "out" else None, "heads" if split == "in" else None
    return (out, *(None,) * (len(w.shape) - 2), inner)


def part(x: Any, mesh: Mesh | None, *axes: str | None) -> jax.ShapeDtypeStruct:
    """Shape of one device's part of an array with these logical axes; other axes are not split."""
    parts = [ways(axis, mesh) for axis in axes] + [1] * (len(x.shape) - len(axes))
    return jax.ShapeDtypeStruct(tuple(n // p for n, p in zip(x.shape, parts, strict=True)), x.dtype)


def check_experts(x: Any, gate_up: Any, down: Any) -> None:
    """Raise ValueError for weights that the kernel of routed experts cannot take."""
    if isinstance(gate_up, Fp8) != isinstance(down, Fp8):
        raise ValueError(
            "grouped_matmul on mosaic_gpu: experts' gate, up and down are FP8 together or not at all"
        )
    for w in (gate_up, down):
        grouped_matmul.check(x, *arrays(w))
