"""XLA's CUDA compiler without a CUDA device."""

import math
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

_Tree = TypeVar("_Tree")

H200 = Path(__file__).with_name("h200.txtpb")


def prepare(dump: Path) -> None:
    """Set up this process; call it before jax compiles anything. `report` reads the files in ``dump``."""
    # From the nvidia-cuda-nvcc wheel: newer than most toolkits, and its code spills less.
    tools = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    # The plugin loads as a compiler only; as a platform it would look for a driver.
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={xla_dump(dump)}"
    for what in ("HOST_LLVM", "PTX", "PTXAS", "SASS"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"


def xla_dump(dump: Path) -> Path:
    """The folder to which XLA writes its compiled modules."""
    return dump / "xla"


def h200s(shape: tuple[int, ...] = (1,), names: tuple[str, ...] = ("x",)) -> Mesh:
    """A mesh of absent devices to compile for, 8 on each host."""
    count = math.prod(shape)
    hosts = -(-count // 8)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=H200.read_text(encoding="utf-8"),
    )
    return topologies.make_mesh(topology, shape, names)


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
