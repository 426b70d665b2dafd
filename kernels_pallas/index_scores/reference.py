"""The operation in jnp: every slot's index keys gathered, a product for all heads, one weighted sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.index_scores.index_rows import PackedKeys, unpack
from kernels_pallas.visible import Window


def index_scores(
    q: Float[Array, "B W H i"],
    weights: Float[Array, "B W H"],
    keys: Float[Array, "P S i"] | PackedKeys,
    page_table: Int[Array, "B n"],
    visible: Window,
) -> Float[Array, "B W L"]:
    """`kernels_pallas.index_scores.api.index_scores`, computed in float32."""
    rows = jax.tree.map(lambda part: part[page_table], keys)
    # FP8 keys are expanded to the type that is multiplied.
    rows = unpack(rows).astype(q.dtype) if isinstance(rows, tuple) else rows
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    given = q.astype(jnp.float32), rows.astype(jnp.float32)
    found = jnp.einsum("bwhi,bli->bwhl", *given, precision="highest")
    # Not a maximum, of which XLA on a CPU makes 0 for NaN.
    found = jnp.where(found < 0, 0, found)
    found = jnp.einsum("bwhl,bwh->bwl", found, weights, precision="highest")
    seen = visible.mask(q.shape[1], rows.shape[1])
    return jnp.where(seen, jnp.where(jnp.isnan(found), jnp.inf, found), -jnp.inf)
