"""The functions that a model calls."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array, Float

from kernels_pallas.quantised import BLOCK, Quantised
from kernels_pallas.rms_norm import mosaic_gpu, reference

Implementation = Literal["xla", "mosaic_gpu"]

# Numbers of a row that a thread block keeps in registers; more would be spilled.
_WIDEST = 8192


@dataclass(frozen=True)
class Normed:
    """Normalised rows.

    Attributes:
        total: what was normalised: x plus the residual.
        plain: the result in bfloat16; None if it is not wanted.
        quantised: the result in e4m3, its rows rounded up to whole tiles of products; those past the given
            ones hold anything. None if it is not wanted.
    """

    total: Float[Array, "T D"]
    plain: Float[Array, "T D"] | None
    quantised: Quantised | None


def rms_norm(
    x: Float[Array, "T D"],
    weight: Float[Array, " D"],
    eps: float,
    *,
    residual: Float[Array, "T D"] | None = None,
    plain: bool = False,
    quantised: bool = True,
    implementation: Implementation,
    interpret: Any = None,
) -> Normed:
    """Root-mean-square normalisation of ``x + residual`` in float32 (arXiv 1910.07467), in one launch.

    Args:
        x: bfloat16.
        weight: of any float type.
        eps: added to the mean square.
        residual: bfloat16; None adds nothing.
        plain: whether the result is wanted in bfloat16.
        quantised: whether it is wanted in e4m3 with a scale per 1x128 block, as products take it.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    check(x)
    if not (plain or quantised):
        raise ValueError("rms_norm: neither plain nor quantised rows are wanted; ask for one of them")
    blocked = (x.shape[0], -1, BLOCK)
    given = (
        x.reshape(blocked),
        None if residual is None else residual.reshape(blocked),
        weight.reshape(-1, BLOCK),
    )
    wanted: dict[str, Any] = {"eps": eps, "plain": plain, "quantised": quantised}
    if implementation == "mosaic_gpu":
        out = list(mosaic_gpu.rms_norm(*given, **wanted, interpret=interpret))
    else:
        out = list(reference.rms_norm(*given, **wanted))
    total = x if residual is None else out.pop(0).reshape(x.shape)
    result = out.pop(0).reshape(x.shape).astype(x.dtype) if plain else None
    return Normed(total, result, _quantised(*out) if quantised else None)


def quantise(x: Float[Array, "k T b"], *, implementation: Implementation, interpret: Any = None) -> Quantised:
    """Rows in e4m3 that are given block after block, as products of heads leave them; one launch.

    Args:
        x: bfloat16, b = 128; the t-th row's blocks are ``x[:, t]``, in order. k is a multiple of 4.
        implementation: as in ``rms_norm``.
        interpret: likewise.

    Returns:
        Values and scales of [M, k * 128], rows rounded up as ``Normed`` says.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    check_blocks(x)
    if implementation == "mosaic_gpu":
        return _quantised(*mosaic_gpu.quantise(x, interpret=interpret))
    return _quantised(*reference.quantise(x))


def _quantised(values: Float[Array, "M k 128"], scale: Float[Array, "k M"]) -> Quantised:
    return Quantised(values.reshape(values.shape[0], -1), scale)


def check(x: Any) -> None:
    """Refuse rows [T, D] that the kernel cannot normalise, with a ValueError that says so."""
    _refuse(
        ("dtype", str(x.dtype), "bfloat16"),
        (f"rest of the width over {mosaic_gpu.WARPS * BLOCK}", x.shape[1] % (mosaic_gpu.WARPS * BLOCK), 0),
        (f"width past {_WIDEST}", max(x.shape[1] - _WIDEST, 0), 0),
    )


def check_blocks(x: Any) -> None:
    """Likewise for the blocks [k, T, 128] that ``quantise`` takes."""
    _refuse(
        ("dtype", str(x.dtype), "bfloat16"),
        ("width of a block", x.shape[2], BLOCK),
        (f"rest of the blocks over {mosaic_gpu.WARPS}", x.shape[0] % mosaic_gpu.WARPS, 0),
    )


def _refuse(*needs: tuple[str, Any, Any]) -> None:
    for what, got, allowed in needs:
        if got != allowed:
            raise ValueError(
                f"rms_norm on mosaic_gpu: {what} is {got}, must be {allowed}; use implementation='xla'"
            )
