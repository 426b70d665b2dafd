"""The function that a model calls."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.expert_layout import mosaic_gpu, reference
from kernels_pallas.grouped_matmul.layout import Groups
from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import Implementation
from kernels_pallas.router.reference import BLOCK


def arrange(
    ids: Int[Array, "T k"],
    counts: Int[Array, "b E"],
    first: Int[Array, " one"],
    *,
    experts: int,
    rows: int,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Groups:
    """Lay out the rows of experts ``first, first + 1, ...``: slots, and tiles of ``rows`` slots.

    Args:
        ids: int32, different experts for each token.
        counts: int32; ``router.reference.count``; rows past the tokens may hold anything.
        first: int32.
        experts: number of experts; a row of another expert gets no slot.
        rows: number of rows of a tile.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    if implementation == "xla":
        return reference.arrange(ids, counts, first, experts=experts, rows=rows)
    if experts % 8:
        raise ValueError(
            f"expert_layout on mosaic_gpu: {experts} experts, must be a multiple of 8; use 'xla'"
        )
    tokens = ids.shape[0]
    padded = jnp.pad(ids, ((0, -tokens % BLOCK), (0, 0)))
    groups = mosaic_gpu.arrange(
        padded.T, counts, first, experts=experts, rows=rows, tokens=tokens, interpret=interpret
    )
    return Groups(groups.token, groups.place[:, :tokens], groups.tiles)
