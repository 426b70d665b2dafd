"""Linear layers and the norms before them, by XLA or by kernels that multiply in FP8."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels_pallas.fp8_matmul import api as fp8_matmul
from kernels_pallas.quantised import Quantised
from kernels_pallas.rms_norm import api as norms
from mtp_jax.model import layers
from mtp_jax.model.kernels import AUTO, Kernels, can, part, runs
from mtp_jax.model.params import Fp8, Mlp
from mtp_jax.model.sharding import partition, sharded, ways

Split = Literal["out", "in"]


@dataclass(frozen=True)
class Rows:
    """Activations as the products that read them take them.

    Attributes:
        shape: (B, W, D).
        plain: None if no product takes them so.
        quantised: of each device's own B * W rows, which more follow to fill tiles; None if no product takes
            them.
    """

    shape: tuple[int, ...]
    plain: Float[Array, "B W D"] | None
    quantised: Quantised | None


Input = Float[Array, "B W D"] | Rows


def plain(x: Input) -> Float[Array, "B W D"]:
    """Activations of a product that does not take them quantised."""
    whole = x.plain if isinstance(x, Rows) else x
    assert whole is not None, "a product reads rows that were made for others"
    return whole


def of_rows(inner: str | None = None) -> tuple[Any, Any]:
    """How quantised rows are split: slots, and perhaps features."""
    return partition("slots", inner), partition(inner, "slots")


def norm(
    x: Float[Array, "*s B W D"],
    weight: Float[Array, " D"],
    eps: float,
    readers: Sequence[bool],
    *,
    added: Sequence[Float[Array, "*t B W D"]] = (),
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "*u B W D"], Rows]:
    """x and what is added to it, and that normalised; if nothing is added, x as it came.

    x or what is added may be parts to be summed (see ``linear``).
    readers: for each product that reads the result, whether it takes it quantised.
    """
    shape = x.shape[-3:]
    if not any(readers) or not all(can(norms.check, a.shape[-1], a.dtype) for a in (x, *added)):
        total = plus(layers.whole(x), added)
        return total, Rows(shape, layers.rms_norm(total, weight, eps), None)
    also_plain = not all(readers)

    def local(weight, *given):
        normed = norms.rms_norm(
            [a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in given],
            weight,
            eps,
            total=bool(added),
            plain=also_plain,
            implementation="mosaic_gpu",
        )
        rows: Any = normed.quantised
        own = given[0].shape[-3:]
        whole = [a.reshape(own) for a in (normed.total, normed.plain) if a is not None]
        return whole, (rows.values, rows.scale)

    slots = partition("slots")
    given = [partition(None, "slots") if a.ndim == 4 else slots for a in (x, *added)]
    run = sharded(local, mesh, (partition(), *given), ([slots] * (bool(added) + also_plain), of_rows()))
    with jax.named_scope("norm"):
        whole, rows = run(weight, x, *added)
    return whole[0] if added else x, Rows(shape, whole[-1] if also_plain else None, Quantised(*rows))


def plus(x: Float[Array, "B W D"], added: Sequence[Float[Array, "*t B W D"]]) -> Float[Array, "B W D"]:
    """x and what is added to it, which may be parts to be summed."""
    return x + functools.reduce(jnp.add, map(layers.whole, added)) if added else x


def heads_as_rows(
    x: Float[Array, "B W N v"], quantised: bool, *, heads_first: bool, mesh: Mesh | None = None
) -> Input:
    """Heads side by side, [B, W, N * v], as the product that reads them takes them.

    heads_first: they come out of a product that leaves them head by head, which spares a transpose.
    """
    wide = (*x.shape[:2], x.shape[2] * x.shape[3])
    own = part(x, mesh, "slots", None, "heads")
    if not quantised or not can(norms.check_blocks, *own.shape[2:], x.dtype):
        return x.reshape(wide)

    def local(x):
        rows = x.reshape(-1, *x.shape[2:])
        given = rows.swapaxes(0, 1) if heads_first else rows
        rows = norms.quantise(given, blocks_first=heads_first, implementation="mosaic_gpu")
        return rows.values, rows.scale

    rows = sharded(local, mesh, (partition("slots", None, "heads"),), of_rows("heads"))(x)
    return Rows(wide, None, Quantised(*rows))


def takes_quantised(
    w: Float[Array, "*o i"] | Fp8,
    dtype: Any,
    *,
    kernels: Kernels = AUTO,
    mesh: Mesh | None = None,
    split: Split | None = None,
) -> bool:
    """Whether ``linear`` multiplies with a kernel, activations in e4m3."""
    if not isinstance(w, Fp8):
        return False
    values = part(w.values, mesh, *_axes(w, split))
    matrix = jax.ShapeDtypeStruct((math.prod(values.shape[:-1]), values.shape[-1]), values.dtype)
    return runs(kernels.linear, fp8_matmul.check, jax.ShapeDtypeStruct((1, 1), dtype), matrix, 64)


def _axes(w: Fp8, split: Split | None) -> tuple[str | None, ...]:
    """Logical axes of a weight."""
    out, inner = "heads" if split == "out" else None, "heads" if split == "in" else None
    return (out, *(None,) * (len(w.shape) - 2), inner)


def linear(
    x: Input,
    w: Float[Array, "*o i"] | Fp8,
    *,
    kernels: Kernels = AUTO,
    mesh: Mesh | None = None,
    split: Split | None = None,
    summed: bool = True,
) -> Float[Array, "B W *o"] | Float[Array, "s B W *o"]:
    """``x @ w.T``; ``split``: whether ``model`` splits the first output axis or the input features of w.

    With a kernel x is quantised to e4m3 in 1x128 blocks, unless it is already. ``summed`` False: where the
    kernel leaves float32 parts to be summed, they are given as they are, for their reader to sum.
    """
    if not isinstance(w, Fp8) or not takes_quantised(w, dtype_of(x), kernels=kernels, mesh=mesh, split=split):
        return layers.linear(plain(x), w)
    axes = _axes(w, split)
    given, of_x = operand(x, axes[-1])

    def local(x, w):
        matrix = w.values.reshape(-1, w.shape[-1])
        y = fp8_matmul.fp8_matmul(rows_of(x), matrix, w.scale, summed=not parts, implementation="mosaic_gpu")
        y = y[..., :rows, :].reshape(*y.shape[:-2], -1, width, *w.shape[:-1])
        return jax.lax.psum(y, "model") if over_model else y

    width = x.shape[1]
    rows, over_model = x.shape[0] * width // ways("slots", mesh), split == "in" and ways("heads", mesh) > 1
    *columns, terms = part(w.values, mesh, *axes).shape
    parts = not (summed or over_model) and fp8_matmul.parts(rows, math.prod(columns), terms) > 1
    specs = Fp8(partition(*axes), partition(axes[0], axes[-1]))
    out = partition(*(None,) * parts, "slots", None, axes[0])
    return sharded(local, mesh, (of_x, specs), out)(given, w)


def dtype_of(x: Input) -> Any:
    """What the rows are, or were before they were quantised."""
    return jnp.bfloat16 if isinstance(x, Rows) and x.plain is None else plain(x).dtype


def operand(x: Input, inner: str | None = None) -> tuple[Any, Any]:
    """Activations for a product with a kernel, quantised if they are, and how a mesh splits them."""
    if isinstance(x, Rows) and x.quantised is not None:
        return (x.quantised.values, x.quantised.scale), of_rows(inner)
    return plain(x), partition("slots", None, inner)


def rows_of(given: Any) -> Float[Array, "T D"] | Quantised:
    """A device's part of an ``operand``."""
    return Quantised(*given) if isinstance(given, tuple) else given.reshape(-1, given.shape[-1])


def mlp_takes_quantised(p: Mlp, dtype: Any, *, kernels: Kernels = AUTO, mesh: Mesh | None = None) -> bool:
    """Whether ``mlp`` multiplies with kernels, activations in e4m3."""
    if not (isinstance(p.gate_up, Fp8) and isinstance(p.down, Fp8)):
        return False
    x = jax.ShapeDtypeStruct((1, 1), dtype)
    parts = (part(w.values, mesh, None, "mlp") for w in (p.gate_up, p.down))
    return all(runs(kernels.linear, fp8_matmul.check, x, part, fp8_matmul.BLOCK) for part in parts)


def mlp(x: Input, p: Mlp, *, kernels: Kernels = AUTO, mesh: Mesh | None = None) -> Float[Array, "B W D"]:
    """``down(silu(gate(x)) * up(x))``."""
    if not mlp_takes_quantised(p, dtype_of(x), kernels=kernels, mesh=mesh):
        return layers.swiglu(plain(x), p)
    given, of_x = operand(x)

    def local(x, gate_up, down):
        y = fp8_matmul.fp8_mlp(
            rows_of(x), gate_up.values, down.values, gate_up.scale, down.scale, implementation="mosaic_gpu"
        )
        y = y[:rows].reshape(-1, *x_shape)
        return y if mesh is None else jax.lax.psum(y, "model")

    x_shape = x.shape[1:]
    rows = x.shape[0] * x_shape[0] // ways("slots", mesh)
    slots, width = partition("slots"), partition(None, "mlp")
    return sharded(local, mesh, (of_x, width, width), slots)(given, p.gate_up, p.down)
