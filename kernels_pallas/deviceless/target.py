"""XLA's CUDA compiler without a CUDA device."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kernels_pallas import absent

_Tree = TypeVar("_Tree")


def prepare(dump: Path) -> None:
    """Set up this process; call it before jax compiles anything. `report` reads the files in ``dump``."""
    absent.prepare()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={xla_dump(dump)}"
    for what in ("HOST_LLVM", "PTX", "PTXAS", "SASS"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"


def xla_dump(dump: Path) -> Path:
    """The folder to which XLA writes its compiled modules."""
    return dump / "xla"


def replicated(inputs: _Tree, mesh: Mesh) -> _Tree:
    """Shapes of ``inputs``, one copy on every device of the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), inputs)


def compile_for(
    mesh: Mesh,
    function: Callable[..., PyTree],
    *inputs: Any,
    dump: Path,
    options: Callable[[], dict[str, Any]] = dict,
) -> jax.stages.Compiled:
    """``function``, jitted or not, compiled for the mesh's devices; its kernels are dumped to ``dump``.

    options: gives XLA's options, where the mesh's device is asked for.
    """
    dump.mkdir(parents=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    # Pallas asks the mesh for the device that it compiles for; otherwise it would ask the local device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jitted.lower(*inputs).compile(options())
