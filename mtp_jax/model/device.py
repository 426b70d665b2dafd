"""The device that a program is traced for; it may be a device that is not present, for compilation alone."""

import os
import re

import jax

from mtp_jax.json_object import JsonObject
from mtp_jax.machine import processor_features

_HOPPER = re.compile(r"NVIDIA (H100|H200|H800|H20|GH200)\b")

# The first two passes move computations of a loop that need weights alone, namely their widening, in front of
# the loop: float32 copies then lie in memory, and the loop reads at least twice the bytes. The third pass
# splits a reduction into two kernels, so that its operand is written to memory; whole, it could be one kernel
# with its operand.
_OFF = "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion,tree_reduction_rewriter"

# Commands that a graph of launches may hold: XLA's own choice (jaxlib 0.10 to 0.11), and loops whose length
# the device computes, as sampling has. Outside of a graph the host waits for the device to read the length.
_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
_GRAPHS = "xla_gpu_enable_command_buffer"


def platform() -> str:
    """ "cpu", "gpu" or "tpu"."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if described is None else described.platform


def compiler_options(micro_batches: int = 1, devices: int = 1) -> JsonObject:
    """Options of XLA for the programs that serve.

    On a CPU they ask for whole vector registers, not halves: loops that stream weights read each cache line
    once (docs/cpu.md). Narrower registers are not affected. On a GPU they make a step one graph of launches,
    collectives between several devices included, unless XLA_FLAGS names graphs itself; with several
    micro-batches they allow two collectives under way at once, one between hosts and one within.
    """
    if platform() == "cpu":
        return {"xla_cpu_prefer_vector_width": 512, "xla_disable_hlo_passes": _OFF}
    if platform() != "gpu":
        return {}
    found: JsonObject = {}
    if _GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        found[_GRAPHS] = _IN_GRAPHS + ",COLLECTIVES" * (devices > 1)
    if micro_batches > 1:
        found["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2 * micro_batches
    return found


def multiplies_bf16() -> bool:
    """Whether this computer's processor has matrix instructions for bfloat16 (AMX), as Linux reports."""
    return "amx_bf16" in processor_features()


def is_hopper() -> bool:
    """Whether the device is an NVIDIA GPU of the Hopper generation, which the kernels are written for."""
    if platform() != "gpu":
        return False
    described = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if described is None else described.device_kind
    return _HOPPER.match(kind) is not None
