"""Random parameters for measurements, made on the device, with the sizes and types of a release.

Other engines call this a dummy load format. One program makes all arrays of a shape: 61 layers have a
thousand arrays.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mtp_jax.checkpoint.formats import declared
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.narrow import Bf16, Fp4, Fp8, Int4, Narrow, is_narrow, with_bits
from mtp_jax.model.params import Params, Spec, dtype_of, param_specs
from mtp_jax.model.sharding import partition

# The root of the mean square of codes that are drawn evenly: -8 to 7; and 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with
# either sign.
_INT4_SIZE = math.sqrt(np.mean(np.square(np.arange(-8.0, 8))))
_FP4_SIZE = math.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6])))
_FP4_ONE = 127
"""The exponent of an FP4 scale of 1."""


def abstract_params(cfg: ModelConfig, dtype: str, keep: Collection[str], mesh: Mesh | None = None) -> Params:
    """Shapes of the parameters in memory, of a checkpoint whose weights are stored as ``cfg`` announces.

    dtype: the model's, "float32" or "bfloat16". keep: names of the ways of storing in which weights stay
    (``checkpoint.formats_kept``). mesh: devices that share them; None: one device.
    """

    def array(spec: Spec, kind: np.dtype) -> jax.ShapeDtypeStruct:
        where = None if mesh is None else NamedSharding(mesh, partition(*spec.axes))
        return jax.ShapeDtypeStruct(spec.shape, kind, sharding=where)

    def of(spec: Spec) -> Any:
        found = declared(cfg, spec)
        if found is None or found[0].name not in keep:
            return array(spec, dtype_of(spec, dtype))
        stored, arrays = found
        return stored.kept(*(array(a.spec, a.dtype) for a in arrays))

    return jax.tree.map(of, param_specs(cfg))


def random_params(key: jax.Array, shapes: Any, experts: int) -> Any:
    """Random numbers in the place of each parameter of a tree of shapes; narrow weights have one scale each.

    experts: number of routed experts of a layer, of which a table of experts by token names some.
    """
    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_narrow)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([_weight(k, leaf, experts) for k, leaf in zip(keys, leaves, strict=True)])


def _weight(key: jax.Array, leaf: Any, experts: int) -> Any:
    if not isinstance(leaf, Narrow):
        return _ids(leaf.shape, experts)(key) if leaf.dtype == jnp.int32 else random_like(key, leaf)
    size = leaf.shape[-1] ** -0.5
    match leaf:
        case Bf16():
            made = Bf16(random_like(key, leaf.values))
        case Fp8():
            made = Fp8(random_like(key, leaf.values), _full(leaf.scale, size))
        case Int4():
            made = Int4(random_like(key, leaf.words), _full(leaf.scale, size / _INT4_SIZE))
        case Fp4():
            exponent = _FP4_ONE + round(math.log2(size / _FP4_SIZE))
            made = Fp4(random_like(key, leaf.codes), _full(leaf.exponents, exponent))
        case _:
            raise TypeError(f"{leaf!r:.80} is no weight of a checkpoint")
    return with_bits(made) if platform() == "cpu" else made


def _full(shape: Any, value: float) -> jax.Array:
    return jnp.full(shape.shape, value, shape.dtype)


def random_like(key: jax.Array, shape: Any) -> jax.Array:
    """Random numbers whose products keep the size of their inputs; near 1 for the gain of a norm.

    Random bits for integers.
    """
    return _maker(shape.shape, jnp.dtype(shape.dtype))(key)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any) -> Callable[[jax.Array], jax.Array]:
    *stack, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]

    def matrix(key: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            bits = jax.random.bits(key, (rows, columns), f"uint{8 * dtype.itemsize}")
            return jax.lax.bitcast_convert_type(bits, dtype)
        scale = 1 if dtype == jnp.float8_e4m3fn else columns**-0.5
        values = jax.random.normal(key, (rows, columns), jnp.float32) * scale
        return (values if len(shape) > 1 else 1 + 0.02 * values).astype(dtype)

    def array(key: jax.Array) -> jax.Array:
        # One matrix at a time: a layer's experts are 15 GB in float32.
        return jax.lax.map(matrix, jax.random.split(key, math.prod(stack))).reshape(shape)

    return jax.jit(array)


@functools.cache
def _ids(shape: tuple[int, ...], experts: int) -> Callable[[jax.Array], jax.Array]:
    """A program for tables [tokens, k] of k different experts of each token."""
    tokens, chosen = shape

    def table(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (tokens, experts)).argsort(axis=1)[:, :chosen].astype(jnp.int32)

    return jax.jit(table)
