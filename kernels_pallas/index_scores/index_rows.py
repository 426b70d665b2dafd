"""Index keys in 132 bytes instead of 256: e4m3 with a scale for each key, a power of two as V3.2's are.

    values, uint8    [i: e4m3]
    scales, float32  [1]

The reference implementation first multiplies queries and keys by a Hadamard matrix, which spreads outliers
over the channels; scores change by rounding only. Such keys do not mix with other keys, so this format has
one writer, which does not multiply.
"""

import jax
import jax.numpy as jnp
from jax import lax

_E4M3 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_E4M3).max)
# The least peak for which the release scales, so that a key of zeros has a scale.
_LEAST = 1e-4

PackedKeys = tuple[jax.Array, jax.Array]


def pack(keys: jax.Array) -> PackedKeys:
    """Keys [..., i] as (values [..., i], scales [..., 1]). A key that is not finite stays not finite."""
    keys = keys.astype(jnp.float32)
    peak = jnp.maximum(jnp.abs(keys).max(axis=-1, keepdims=True), _LEAST)
    scales = jnp.exp2(jnp.ceil(jnp.log2(peak / _LARGEST)))
    return lax.bitcast_convert_type((keys / scales).astype(_E4M3), jnp.uint8), scales


def unpack(packed: PackedKeys) -> jax.Array:
    """The rows that `pack` packed, up to its rounding, float32 [..., i]."""
    values, scales = packed
    return lax.bitcast_convert_type(values, _E4M3).astype(jnp.float32) * scales
