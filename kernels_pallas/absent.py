"""GPUs that are not here, to compile for them: XLA's CUDA compiler needs neither a card nor a driver."""

import math
import os
import sysconfig
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

# Descriptions of cards: stream_executor.GpuTargetConfigProto.
CARDS = {"h200": Path(__file__).with_name("h200.txtpb")}
_PER_HOST = 8


def prepare() -> None:
    """Set up this process; call it before jax compiles anything."""
    # From the nvidia-cuda-nvcc wheel: newer than most toolkits, and its code spills less.
    tools = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    # The plugin loads as a compiler only; as a platform it would look for a driver.
    jax.config.update("jax_platforms", "cpu")


def mesh_of(card: str, shape: tuple[int, ...] = (1,), names: tuple[str, ...] = ("x",)) -> Mesh:
    """A mesh of absent devices to compile for, 8 on each host.

    card: a name in ``CARDS``. Raises RuntimeError without jax's CUDA plugin.
    """
    count = math.prod(shape)
    hosts = -(-count // _PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=CARDS[card].read_text(encoding="utf-8"),
    )
    return topologies.make_mesh(topology, shape, names)
