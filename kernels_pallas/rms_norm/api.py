"""The functions that a model calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import Implementation, need
from kernels_pallas.quantised import BLOCK, Quantised
from kernels_pallas.rms_norm import mosaic_gpu, reference
from kernels_pallas.weighed import Weighed

# Numbers of a row that a thread block keeps in registers; more would be spilled.
_WIDEST = 8192
# Widths are multiples of this: each warp of a thread block has a block.
WIDTHS = mosaic_gpu.WARPS * BLOCK


@dataclass(frozen=True)
class Normed:
    """Normalised rows.

    Attributes:
        total: the sum before it is normalised, in bfloat16; None if not requested.
        plain: the result in bfloat16; None if not requested.
        quantised: the result in e4m3, its rows rounded up to whole tiles of products; padding rows are
            undefined. None if not requested.
    """

    total: Float[Array, "T D"] | None
    plain: Float[Array, "T D"] | None
    quantised: Quantised | None


def rms_norm(
    addends: Sequence[Float[Array, "... _ D"] | Weighed],
    weight: Float[Array, " D"],
    eps: float,
    *,
    rows: int | None = None,
    total: bool = False,
    plain: bool = False,
    quantised: bool = True,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Normed:
    """Root-mean-square normalisation of a sum in float32 (arXiv 1910.07467), in one launch.

    Args:
        addends: bfloat16 arrays; the float32 parts that a product leaves to be summed; experts' results, but
            not first. Rows past T are not read.
        weight: any float type.
        eps: added to the mean square.
        rows: number of rows, T; None: the number of the first addend's rows.
        total: whether to return the sum in bfloat16.
        plain: whether to return the result in bfloat16.
        quantised: whether to return it in e4m3 with a scale per 1x128 block, as products take it.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    width = addends[0].shape[-1]
    rows = rows or addends[0].shape[-2]
    for x in addends:
        check(width, x.dtype)
    if not (plain or quantised):
        raise ValueError("rms_norm: neither plain nor quantised rows are wanted; ask for one of them")
    block = -1, width // BLOCK, BLOCK
    weight = weight.reshape(-1, BLOCK)
    wanted: dict[str, Any] = {"eps": eps, "total": total, "plain": plain, "quantised": quantised}
    if implementation == "mosaic_gpu":
        each = [
            (x.rows.reshape(block), x.place, x.weights)
            if isinstance(x, Weighed)
            else x.reshape(-1, x.shape[-2], *block[1:])
            for x in addends
        ]
        out = list(mosaic_gpu.rms_norm(each, weight, rows=rows, **wanted, interpret=interpret))
    else:
        sums = (x.total() if isinstance(x, Weighed) else x for x in addends)
        each = [x.reshape(-1, x.shape[-2], *block[1:])[:, :rows] for x in sums]
        out = list(reference.rms_norm(each, weight, **wanted))
    x = out.pop(0).reshape(rows, width) if total else None
    result = out.pop(0).reshape(rows, width).astype(jnp.bfloat16) if plain else None
    return Normed(x, result, _quantised(*out) if quantised else None)


def quantise(
    x: Float[Array, "k T b"] | Float[Array, "T k b"],
    *,
    blocks_first: bool,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Quantised:
    """Rows in e4m3, of blocks of 128; one launch.

    Args:
        x: bfloat16, b = 128; k is a multiple of 4.
        blocks_first: whether row t's blocks are ``x[:, t]``, as products of heads return them, not ``x[t]``.
        implementation: see ``rms_norm``.
        interpret: likewise.

    Returns:
        Values and scales of [M, k * 128], rows rounded up as ``Normed`` says.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    check_blocks(x.shape[0 if blocks_first else 1], x.shape[2], x.dtype)
    if implementation == "mosaic_gpu":
        return _quantised(*mosaic_gpu.quantise(x, blocks_first=blocks_first, interpret=interpret))
    return _quantised(*reference.quantise(x, blocks_first=blocks_first))


def _quantised(values: Float[Array, "M k 128"], scale: Float[Array, "k M"]) -> Quantised:
    return Quantised(values.reshape(values.shape[0], -1), scale)


def check(width: int, dtype: DTypeLike) -> None:
    """Refuse rows that the kernel cannot normalise, with a ValueError that says so."""
    need(
        "rms_norm",
        ("dtype", str(dtype), ("bfloat16", "float32")),
        (f"rest of the width over {WIDTHS}", width % WIDTHS, (0,)),
        (f"width past {_WIDEST}", max(width - _WIDEST, 0), (0,)),
    )


def check_blocks(count: int, width: int, dtype: DTypeLike) -> None:
    """Refuse rows of ``count`` blocks that ``quantise`` cannot take, with a ValueError."""
    need(
        "rms_norm",
        ("dtype", str(dtype), ("bfloat16",)),
        ("width of a block", width, (BLOCK,)),
        (f"rest of the blocks over {mosaic_gpu.WARPS}", count % mosaic_gpu.WARPS, (0,)),
    )
