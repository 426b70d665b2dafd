"""The function that a model calls."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.mla_low_rank import mosaic_gpu, reference
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.quantised import Quantised
from kernels_pallas.rms_norm import api as norms


def mla_low_rank(
    q: Float[Array, "s M K"],
    kv: Float[Array, "u N c"],
    q_norm: Float[Array, " K"],
    kv_norm: Float[Array, " C"],
    angles: tuple[Float[Array, "B W r"], Float[Array, "B W r"]],
    pages: Float[Array, "P S c"] | None,
    page_table: Int[Array, "B n"],
    positions: Int[Array, "B W"],
    *,
    eps: float,
    interleaved: bool,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> tuple[Quantised, Array]:
    """The norms of MLA's low ranks; latents and their rotated key written to the paged cache. One launch.

    arXiv 2405.04434, eqs. 9 to 15, without the products.

    Args:
        q: result of the queries' low-rank projection, or the float32 parts of it to be summed, of the B * W
            tokens; later rows are not read.
        kv: likewise the rows [latent | key], C + R with R = 2r.
        q_norm: weight of q's norm.
        kv_norm: weight of the latents' norm.
        angles: cosines and sines of every token, float32; two arrays, as XLA has them before it stacks them.
        pages: the cache, which the caller must not use again. None: rows are returned, not written.
        page_table: pages of each slot in order, int32.
        positions: row of its slot that each token is written to, int32; one outside the slot's pages is not.
        eps: added to the mean squares.
        interleaved: whether a pair's numbers are neighbours; else they come from the two halves of R.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, C 512, R 64, and K a multiple of 512 up to
            8192; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Returns:
        q normed and quantised, its rows rounded up to whole tiles of products as `rms_norm` does; and the
        pages, in place with jax 0.11 or newer, or the rows [B, W, C + R] in bfloat16. The key's first numbers
        of pairs come first.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    slots, window = positions.shape
    tokens = slots * window
    cos, sin = (x.reshape(tokens, -1) for x in angles)
    given, where = (q_norm, kv_norm, (cos, sin)), (page_table, positions.reshape(-1))
    options: dict[str, Any] = {"eps": eps, "interleaved": interleaved}
    if implementation == "xla":
        values, scale, out = reference.mla_low_rank(
            q[:, :tokens], kv[:, :tokens], *given, pages, *where, **options
        )
    else:
        check(q, kv, kv_norm, pages)
        here = pages if mosaic_gpu.CAN_REUSE else None
        values, scale, out = mosaic_gpu.mla_low_rank(
            q, kv, *given, here, *where, **options, interpret=interpret
        )
        if pages is not None and here is None:
            out = reference.write(out, pages, *where)
    low = Quantised(values.reshape(values.shape[0], -1), scale)
    return low, out.astype(jnp.bfloat16).reshape(slots, window, -1) if pages is None else out


def check(q: ArrayOrShape, kv: ArrayOrShape, kv_norm: ArrayOrShape, pages: ArrayOrShape | None) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError; looks at shapes and dtypes."""
    norms.check(q.shape[-1], q.dtype)
    rope = kv.shape[-1] - kv_norm.shape[0]
    need(
        "mla_low_rank",
        ("dtype of latents", str(kv.dtype), ("bfloat16", "float32")),
        ("dtype of the cache", "bfloat16" if pages is None else str(pages.dtype), ("bfloat16",)),
        ("latent rank", kv_norm.shape[0], (mosaic_gpu.RANK,)),
        ("rope dimensions", rope, (mosaic_gpu.ROPE,)),
    )
