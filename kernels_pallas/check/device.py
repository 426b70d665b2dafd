"""Peaks of Hopper GPUs."""

from dataclasses import dataclass

from kernels_pallas.check.case import Work


@dataclass(frozen=True)
class Rates:
    """Peaks of one GPU.

    Attributes:
        bandwidth: bytes/s of its memory, from the data sheet.
        flops: operations per second of its tensor cores, by format, as a large matrix product reaches them.
    """

    bandwidth: float
    flops: dict[str, float]

    def floor(self, work: Work) -> float:
        """The shortest time in seconds that the work can take."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops[work.format])


# Tensor cores' rates are 80 % of the data sheet's, about what a large product reaches.
_SXM = {"bf16": 790e12, "fp8": 1580e12}
_NVL = {"bf16": 668e12, "fp8": 1336e12}
_PCIE = {"bf16": 605e12, "fp8": 1210e12}
# Words of a device's name: the first entry all of whose words occur in it applies.
RATES = {
    "H100 PCIe": Rates(2.0e12, _PCIE),
    "H800 PCIe": Rates(2.0e12, _PCIE),
    "H100 NVL": Rates(3.9e12, _NVL),
    "H200 NVL": Rates(4.8e12, _NVL),
    "GH200 144G": Rates(4.9e12, _SXM),
    "GH200": Rates(4.0e12, _SXM),
    "H200": Rates(4.8e12, _SXM),
    "H100": Rates(3.35e12, _SXM),
    "H800": Rates(3.35e12, _SXM),
    "H20": Rates(4.0e12, {"bf16": 118e12, "fp8": 236e12}),
}


def rates(kind: str) -> Rates | None:
    """Peaks of the GPU with the name ``kind``, for example "NVIDIA H200"; None if it is unknown."""
    words = set(kind.split())
    return next((rates for name, rates in RATES.items() if words.issuperset(name.split())), None)
