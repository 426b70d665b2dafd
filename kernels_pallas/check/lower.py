"""Lowers cases for a Hopper GPU on any machine; Pallas refuses most unsupported code here already."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels_pallas.check.case import Case

# The attributes that Pallas reads of the device that it compiles for.
_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def lower(case: Case) -> str:
    """The case's kernel, lowered for CUDA: StableHLO with the kernel as a custom call."""
    inputs = jax.eval_shape(case.inputs, jax.random.key(0))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_H200)):
        return jax.jit(case.kernel).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
