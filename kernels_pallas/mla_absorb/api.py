"""The function that a model calls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.mla_absorb import mosaic_gpu, reference
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need


def mla_absorb(
    q: Float[Array, "s M D"],
    k_up: Float[Array, "N h C"],
    angles: tuple[Float[Array, "B W r"], Float[Array, "B W r"]],
    *,
    interleaved: bool,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> tuple[Float[Array, "B W N C"], Float[Array, "B W N R"]]:
    """Queries for absorbed attention: the first part in the latent space, the last part rotated. One launch.

    arXiv 2405.04434, eqs. 13 to 15, and k_up absorbed into eq. 16 (section 2.1.2).

    Args:
        q: result of the queries' product, or the float32 parts of it to be summed, of the B * W tokens, which
            come first; later rows are not read. D = N * (h + R): a head's columns lie side by side.
        k_up: up-projection of latents to keys.
        angles: cosines and sines of every token, float32, r = R / 2.
        interleaved: whether a pair's numbers are neighbours; else they come from the two halves of R.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, C 512, R 64, h a multiple of 64, at most 8
            tokens; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        Both parts in bfloat16. The rotated part's first numbers of pairs come first.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    slots, window, _ = angles[0].shape
    tokens, heads = slots * window, k_up.shape[0]
    cos_sin = angles[0].reshape(tokens, -1), angles[1].reshape(tokens, -1)
    if implementation == "xla":
        by_head = q[:, :tokens].reshape(q.shape[0], tokens, heads, -1)
        both = reference.mla_absorb(by_head, k_up, cos_sin, interleaved=interleaved)
    else:
        check(jax.ShapeDtypeStruct((slots, window, q.shape[-1]), q.dtype), k_up)
        both = mosaic_gpu.mla_absorb(q, k_up, cos_sin, interleaved=interleaved, interpret=interpret)
    inward, rope = (x.astype(jnp.bfloat16).reshape(slots, window, heads, -1) for x in both)
    return inward, rope


def check(q: ArrayOrShape, k_up: ArrayOrShape) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError. q: the queries' product [B, W, D]."""
    (slots, window, width), (heads, nope, rank) = q.shape, k_up.shape
    need(
        "mla_absorb",
        (f"tokens past the most, {mosaic_gpu.MOST},", max(slots * window - mosaic_gpu.MOST, 0), (0,)),
        ("dtype of queries", str(q.dtype), ("bfloat16", "float32")),
        ("dtype of the up-projection", str(k_up.dtype), ("bfloat16",)),
        ("latent rank", rank, (mosaic_gpu.RANK,)),
        ("rope dimensions", width // heads - nope, (mosaic_gpu.ROPE,)),
        (f"the rest of a head's width over {mosaic_gpu.WIDTHS}", nope % mosaic_gpu.WIDTHS, (0,)),
    )
