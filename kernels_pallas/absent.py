"""Devices that are not here, to compile for them: XLA's compilers need neither a card nor a driver."""

import math
import os
import re
import sysconfig
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

# Descriptions of cards: stream_executor.GpuTargetConfigProto.
CARDS = {"h200": Path(__file__).with_name("h200.txtpb")}
# Generations of TPUs of one core per chip: libtpu's names of topologies, and of accelerators.
TPUS = {"v5e": "v5litepod", "v6e": "v6e"}
_PER_HOST = 8
# Chips of one host as they are wired.
_GRIDS = {1: (1, 1), 4: (2, 2), 8: (2, 4)}


def memory_of(mesh: Mesh) -> int | None:
    """Bytes of memory of a mesh's card; None for a device that is not in ``CARDS``."""
    kind = mesh.devices.flat[0].device_kind
    for path in CARDS.values():
        described = dict(re.findall(r'(\w+): "?([^"\n]*)', path.read_text(encoding="utf-8")))
        if described["device_description_str"] == kind:
            return int(described["device_memory_size"])
    return None


def prepare() -> None:
    """Set up this process; call it before jax compiles anything."""
    # From the nvidia-cuda-nvcc wheel: newer than most toolkits, and its code spills less.
    tools = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    # The plugins load as compilers only; as platforms they would look for a driver, or for a chip.
    jax.config.update("jax_platforms", "cpu")
    # libtpu asks no server of a cloud which TPU this computer has, and lets other processes compile, too.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def mesh_of(device: str, shape: tuple[int, ...] = (1,), names: tuple[str, ...] = ("x",)) -> Mesh:
    """A mesh of absent devices to compile for, 8 on each host.

    device: a name in ``CARDS`` or ``TPUS``. Raises RuntimeError without jax's plugin for it, ValueError for a
    number of chips that no host has.
    """
    count = math.prod(shape)
    if device in TPUS:
        return topologies.make_mesh(_tpus(device, count), shape, names)
    hosts = -(-count // _PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=CARDS[device].read_text(encoding="utf-8"),
    )
    return topologies.make_mesh(topology, shape, names)


def _tpus(name: str, count: int) -> topologies.TopologyDescription:
    if count not in _GRIDS:
        raise ValueError(f"{count} chips of {name}; a host has {' or '.join(map(str, _GRIDS))}")
    grid = _GRIDS[count]
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{TPUS[name]}-{count}"
    return topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name}:{grid[0]}x{grid[1]}", chips_per_host_bounds=(*grid, 1)
    )
