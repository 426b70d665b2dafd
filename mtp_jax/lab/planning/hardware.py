"""Kinds of GPUs, as their makers describe them.

Peaks are dense, without sparsity. Sources: NVIDIA's data sheets of H100, H200, HGX B200 and GB200 NVL72, the
dense peaks of the last two as glennklockwood.com/garden/processors/B200 has them; for H800 (an H100 with less
NVLink) and H20 the figures that engines published with their measurements (``published``). ``nvidia-smi``
reports the memory. The network is one adapter of 400 Gbit/s per GPU, of 200 Gbit/s for H20.
"""

from dataclasses import dataclass
from typing import Literal

from mtp_jax.errors import ConfigError

Rate = Literal["bf16", "fp8", "fp4"]
"""Formats that the tensor cores multiply."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: its name in options and tables.
        memory_mib: MiB of memory.
        bandwidth: bytes per second from memory.
        bf16, fp8, fp4: operations per second at most; where there is no FP4, that of FP8.
        nvlink: bytes per second and direction to GPUs of the same NVLink domain.
        network: bytes per second and direction to other domains, by the network adapter of each GPU.
        domain: number of GPUs of an NVLink domain.
        young: whether kernels reach a smaller share of its peaks than on Hopper.
    """

    name: str
    memory_mib: int
    bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    nvlink: float
    network: float
    domain: int = 8
    young: bool = False

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.memory_mib * 2**20

    def peak(self, rate: Rate) -> float:
        """Operations per second."""
        return {"bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}[rate]


_ALL = (
    Gpu("h100", 81_559, 3.35e12, 989e12, 1979e12, 1979e12, 450e9, 50e9),
    Gpu("h800", 81_559, 3.35e12, 989e12, 1979e12, 1979e12, 200e9, 50e9),
    Gpu("h20", 97_871, 4.0e12, 148e12, 296e12, 296e12, 450e9, 25e9),
    Gpu("h200", 143_771, 4.8e12, 989e12, 1979e12, 1979e12, 450e9, 50e9),
    Gpu("b200", 183_359, 8.0e12, 2250e12, 4500e12, 9000e12, 900e9, 50e9, young=True),
    Gpu("gb200", 189_471, 8.0e12, 2500e12, 5000e12, 10000e12, 900e9, 50e9, domain=72, young=True),
)
GPUS = {gpu.name: gpu for gpu in _ALL}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, in upper or lower case. Raises ConfigError for an unknown one."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ConfigError(f"unknown GPU {name!r:.80}; expected one of {', '.join(GPUS)}") from None


def gpu_of(device: str) -> Gpu | None:
    """The kind of a device that the driver names so, such as "NVIDIA H100 80GB HBM3"; None if unknown.

    Cards on PCIe boards have other peaks and are unknown.
    """
    words = device.upper().split()
    if {"PCIE", "NVL"} & {*words}:
        return None
    return next((gpu for name, gpu in GPUS.items() if name.upper() in words), None)
