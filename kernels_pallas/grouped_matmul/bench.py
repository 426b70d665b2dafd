"""What else computes a grouped product on a GPU."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul.reference import expand_weights
from kernels_pallas.quantised import Quantised


def baselines() -> Mapping[str, Callable[..., Any]]:
    """By name: functions of the kernel's inputs."""
    return MappingProxyType({"xla": xla})


def xla(
    x: Float[Array, "M K"],
    w: Float[Array, "E b N K"],
    x_scale: Float[Array, "k M"] | None,
    w_scale: Float[Array, "E b n k"] | None,
    tile_group: Int[Array, " t"],
    end: Int[Array, " g"],
) -> Array:
    """``lax.ragged_dot`` in bfloat16, after expanding FP8 operands."""
    rows = x.shape[0] // tile_group.shape[0]
    held = jnp.arange(tile_group.shape[0]) < end[-1]
    sizes = jnp.zeros(w.shape[0], jnp.int32).at[tile_group].add(jnp.where(held, rows, 0))
    left = x if x_scale is None else Quantised(x, x_scale).expand().astype(jnp.bfloat16)
    right = w if w_scale is None else expand_weights(w, w_scale, jnp.bfloat16)
    right = right.reshape(w.shape[0], -1, w.shape[-1]).swapaxes(1, 2)
    y = jax.lax.ragged_dot(left, right, sizes)
    if w.shape[1] == 1:
        return y
    gate, up = jnp.split(y, 2, axis=1)
    return jax.nn.silu(gate) * up
