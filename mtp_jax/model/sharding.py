"""Mesh axes ``data`` and ``model``, and arrays split over them by ``spec.RULES``.

Slots and pages are split over ``data``; heads, MLP width and vocabulary over ``model``; experts over both.
Without a mesh `constrain` and `sharded` change nothing, and every dimension has one part, so that one code
path serves one device and many.
"""

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.divide import check_divides
from mtp_jax.model.spec import RULES, Spec
from mtp_jax.model.spec import ways as parts_of


def make_mesh(data: int, model: int) -> Mesh:
    """A ``data`` x ``model`` mesh of the first devices. Raises ConfigError if there are too few."""
    available = len(jax.devices())
    if data * model > available:
        raise ConfigError(f"a {data}x{model} mesh needs {data * model} devices; {available} are visible")
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto, AxisType.Auto), devices=devices)


def with_auto_axes(mesh: Mesh | None) -> Mesh | None:
    """The mesh with axes of the type that XLA partitions over: ``jax.make_mesh`` makes Explicit axes.

    Raises ConfigError for other axes than data and model.
    """
    if mesh is None:
        return None
    _check_axes(mesh)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _check_axes(mesh: Mesh | AbstractMesh) -> None:
    if set(mesh.axis_names) != {"data", "model"}:
        raise ConfigError(f"mesh axes are {mesh.axis_names}; expected ('data', 'model'), as make_mesh gives")


def partition(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(RULES[a] for a in axes))


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Annotate an activation with its logical axes."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition(*axes)))


def sharded(
    f: Callable[..., PyTree], mesh: Mesh | None, in_specs: tuple[PyTree, ...], out_specs: PyTree
) -> Callable[..., PyTree]:
    """``f`` on each device's own shards; ``f`` itself without a mesh."""
    if mesh is None:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def ways(axis: str | None, mesh: Mesh | AbstractMesh | None) -> int:
    """Number of parts that a dimension with this logical axis is split into."""
    return 1 if mesh is None else parts_of(axis, mesh.shape)


def data_size(mesh: Mesh | None) -> int:
    """Number of groups that slots and pages are split into."""
    return 1 if mesh is None else mesh.shape["data"]


def param_sharding(spec: Spec, mesh: Mesh) -> NamedSharding:
    """The sharding of a parameter."""
    return NamedSharding(mesh, partition(*spec.axes))


def check_divisible(cfg: ModelConfig, mesh: Mesh | AbstractMesh | None) -> None:
    """Raise ConfigError if a sharded dimension of the model does not divide over the mesh."""
    if mesh is None:
        return
    _check_axes(mesh)
    check_divides(cfg, mesh.shape)
