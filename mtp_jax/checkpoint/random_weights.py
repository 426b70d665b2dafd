"""Random parameters, made on the devices that hold them, with the sizes and types of a release.

Other engines call this a dummy load format. One program makes all arrays of a shape: 61 layers have a
thousand arrays.
"""

import functools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtp_jax.checkpoint.formats import declared
from mtp_jax.checkpoint.orbax_store import is_orbax
from mtp_jax.checkpoint.read import Loaded, check_blocks
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.narrow import Bf16, Fp4, Fp8, Int4, Narrow, Nvfp4, is_narrow, with_bits
from mtp_jax.model.params import Params, Spec, dtype_of, param_specs
from mtp_jax.model.sharding import check_divisible, partition, sharded

# The root of the mean square of codes that are drawn evenly: -8 to 7; and 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with
# either sign.
_INT4_SIZE = math.sqrt(np.mean(np.square(np.arange(-8.0, 8))))
_FP4_SIZE = math.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6])))
_FP4_ONE, _E4M3_ONE = 127, 0x38
"""The exponent of an FP4 scale of 1, and the byte of an NVFP4 scale of 1."""
_SEED = 0
# One operation of XLA, while JAX's default generator is about a hundred: half of a program's compilation.
_IMPL = "unsafe_rbg"


def check_no_weights(folder: Path) -> None:
    """Raise ConfigError for random weights in the place of weights that could be loaded."""
    if is_orbax(folder) or any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} has weights; load_format=dummy is for a folder with config.json alone, "
            "load_format=dummy-instead for any"
        )


def random_model(
    cfg: ModelConfig, dtype: str, keep: Collection[str], mesh: Mesh | None, nextn: int | None
) -> Loaded:
    """See ``checkpoint.make_random``. keep: as for ``abstract_params``. nextn: NextN layers; None: all."""
    found = abstract_model(cfg, dtype, keep, mesh, nextn)
    made = random_params(jax.random.key(_SEED), found.params, cfg.n_routed_experts)
    return Loaded(found.config, made, 0)


def abstract_model(
    cfg: ModelConfig, dtype: str, keep: Collection[str], mesh: Mesh | None, nextn: int | None
) -> Loaded:
    """The shapes of ``random_model``'s parameters."""
    check_divisible(cfg, mesh)
    count = cfg.num_nextn_predict_layers
    if nextn is not None and not 0 <= nextn <= count:
        raise ConfigError(
            f"num_nextn_layers = {nextn}, but config.json counts {count}; expected 0 to {count}"
        )
    cfg = cfg.with_nextn(cfg.nextn_moe[:nextn])
    return Loaded(cfg, abstract_params(cfg, dtype, keep, mesh), 0)


def abstract_params(cfg: ModelConfig, dtype: str, keep: Collection[str], mesh: Mesh | None = None) -> Params:
    """Shapes of the parameters in memory, of a checkpoint whose weights are stored as ``cfg`` announces.

    dtype: the model's, "float32" or "bfloat16". keep: names of the ways of storing in which weights stay
    (``checkpoint.formats_kept``). mesh: devices that share them; None: one device. Raises ConfigError for a
    mesh that would split blocks of a narrow weight.
    """

    def array(spec: Spec, kind: np.dtype) -> jax.ShapeDtypeStruct:
        where = None if mesh is None else NamedSharding(mesh, partition(*spec.axes))
        return jax.ShapeDtypeStruct(spec.shape, kind, sharding=where)

    def of(spec: Spec) -> Any:
        found = declared(cfg, spec)
        if found is None or found[0].name not in keep:
            return array(spec, dtype_of(spec, dtype))
        stored, arrays = found
        check_blocks(stored, spec, arrays, mesh)
        return stored.kept(*(array(a.spec, a.dtype) for a in arrays))

    return jax.tree.map(of, param_specs(cfg))


def random_params(key: jax.Array, shapes: Any, experts: int) -> Any:
    """Random numbers in the place of each parameter of a tree of shapes; narrow weights have one scale each.

    experts: number of routed experts of a layer, of which a table of experts by token names some.
    """
    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_narrow)
    # Not on a device: a mesh of several hosts takes no array of one of them.
    keys = np.tile(np.asarray(jax.random.key_data(jax.random.split(key, len(leaves)))), 2)
    return tree.unflatten([_weight(k, leaf, experts) for k, leaf in zip(keys, leaves, strict=True)])


def _weight(key: np.ndarray, leaf: Any, experts: int) -> Any:
    if not isinstance(leaf, Narrow):
        ids = leaf.dtype == jnp.int32
        return _ids(leaf.shape, experts, leaf.sharding)(key) if ids else _random_like(key, leaf)
    size = leaf.shape[-1] ** -0.5
    match leaf:
        case Bf16():
            whole, made = leaf.values, Bf16(_random_like(key, leaf.values))
        case Fp8():
            whole, made = leaf.values, Fp8(_random_like(key, leaf.values), _full(leaf.scale, size))
        case Int4():
            scale = _full(leaf.scale, size / _INT4_SIZE)
            whole, made = leaf.words, Int4(_random_like(key, leaf.words), scale)
        case Fp4():
            exponents = _full(leaf.exponents, _FP4_ONE + round(math.log2(size / _FP4_SIZE)))
            whole, made = leaf.codes, Fp4(_random_like(key, leaf.codes), exponents)
        case Nvfp4():
            scale = _full(leaf.scale, _E4M3_ONE)
            wholes = _full(leaf.times, size / _FP4_SIZE), _full(leaf.over, 1.0)
            whole, made = leaf.codes, Nvfp4(_random_like(key, leaf.codes), *wholes, scale)
        case _:
            raise TypeError(f"{leaf!r:.80} is no weight of a checkpoint")
    return with_bits(made) if platform() == "cpu" and whole.sharding is None else made


def _full(shape: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    return jnp.full(shape.shape, value, shape.dtype, device=shape.sharding)


def _random_like(key: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers whose products keep the size of their inputs; near 1 for the gain of a norm.

    Random bits for integers.
    """
    return _maker(shape.shape, jnp.dtype(shape.dtype), shape.sharding)(key)


@functools.cache
def _maker(
    whole: tuple[int, ...], dtype: Any, where: NamedSharding | None
) -> Callable[[np.ndarray], jax.Array]:
    """A program that makes an array of this shape; each device makes its own part."""
    shape = whole if where is None else where.shard_shape(whole)
    *stack, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]

    def matrix(key: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            bits = jax.random.bits(key, (rows, columns), f"uint{8 * dtype.itemsize}")
            return jax.lax.bitcast_convert_type(bits, dtype)
        scale = 1 if dtype == jnp.float8_e4m3fn else whole[-1] ** -0.5
        values = jax.random.normal(key, (rows, columns), jnp.float32) * scale
        return (values if len(shape) > 1 else 1 + 0.02 * values).astype(dtype)

    def part(data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl=_IMPL)
        if axes := _axes(where):  # one number for all axes: this generator's folds commute
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        # One matrix at a time: a layer's experts are 15 GB in float32.
        return jax.lax.map(matrix, jax.random.split(key, math.prod(stack))).reshape(shape)

    if where is None:
        return jax.jit(part)
    assert isinstance(where.mesh, Mesh)
    return jax.jit(sharded(part, where.mesh, (PartitionSpec(),), where.spec), out_shardings=where)


def _axes(where: NamedSharding | None) -> tuple[str, ...]:
    """The axes of the mesh over which an array is split; devices along another axis have equal parts."""
    split = (None,) if where is None else where.spec
    each = ((names,) if isinstance(names, str) else names for names in split if names)
    return tuple(name for names in each for name in names)


@functools.cache
def _ids(
    shape: tuple[int, ...], experts: int, where: NamedSharding | None
) -> Callable[[np.ndarray], jax.Array]:
    """A program for tables [tokens, k] of k different experts of each token."""
    tokens, chosen = shape

    def table(data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl=_IMPL)
        return jax.random.uniform(key, (tokens, experts)).argsort(axis=1)[:, :chosen].astype(jnp.int32)

    return jax.jit(table, out_shardings=where)
