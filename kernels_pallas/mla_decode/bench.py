"""What else computes absorbed MLA on a GPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.mla_decode.fp8_rows import Rows, unpack
from kernels_pallas.mla_decode.visible import Visible


def baselines(scale: float, rank: int) -> Mapping[str, Callable[..., Any]]:
    """By name: functions of the kernel's inputs."""
    return {"xla": partial(xla, scale=scale, rank=rank)}


def xla(
    q: jax.Array, pages: jax.Array | Rows, page_table: jax.Array, visible: Visible, *, scale: float, rank: int
) -> jax.Array:
    """XLA's own lowering in bfloat16: rows gathered to memory, two matrix products, a softmax in float32."""
    rows = jax.tree.map(lambda part: part[page_table], pages)
    rows = unpack(rows, rank).astype(q.dtype) if isinstance(rows, tuple) else rows
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    mask = visible.mask(rows.shape[1])
    rows = jnp.where(mask.any(axis=1)[..., None], rows, 0)
    scores = jnp.einsum("bwnc,blc->bwnl", q, rows, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bwnl,blc->bwnc", weights, rows[..., :rank])
