"""The function that a model calls."""

from jaxtyping import Array, Float

from kernels_pallas.mla_decode.api import MixedLatents
from kernels_pallas.mla_values import mosaic_gpu, reference
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.quantised import BLOCK, Quantised


def mla_values(
    mixed: MixedLatents,
    v_up: Float[Array, "N v C"],
    *,
    window: int,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Quantised:
    """The values of every head, side by side, in e4m3: parts merged, and v_up absorbed. One launch.

    arXiv 2405.04434, section 2.1.2.

    Args:
        mixed: attention's result, before its parts are merged.
        v_up: up-projection of latents to values.
        window: number of tokens of a slot.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, C 512, v a multiple of 128, at most 8
            tokens; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        B * W rows of N * v values and their scales, rounded up to whole tiles of products; padding rows are
        undefined.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    given = mixed.out, mixed.lse, v_up
    if implementation == "xla":
        return reference.mla_values(*given, window=window)
    check(mixed.out.shape[1] * window, v_up)
    values, scale = mosaic_gpu.mla_values(*given, window=window, interpret=interpret)
    return Quantised(values.reshape(values.shape[0], -1), scale)


def check(tokens: int, v_up: ArrayOrShape) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError."""
    _, width, rank = v_up.shape
    need(
        "mla_values",
        (f"tokens past the most, {mosaic_gpu.MOST},", max(tokens - mosaic_gpu.MOST, 0), (0,)),
        ("dtype of the up-projection", str(v_up.dtype), ("bfloat16",)),
        ("latent rank", rank, (mosaic_gpu.RANK,)),
        (f"rest of a head's width over {BLOCK}", width % BLOCK, (0,)),
    )
