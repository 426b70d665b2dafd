"""Room of a device beside weights and programs: one sum for engines, `info` and `plan`."""

from dataclasses import dataclass

_GIB = 2**30

MEMORY_FRACTION, OVERHEAD = 0.94, 4e9
"""The share of a GPU's memory that is used, and the bytes that activations, buffers of collectives, CUDA and
code take of it. An allowance; a step of this engine has less than 0.3 GiB of activations (docs/kernels.md).
"""


@dataclass(frozen=True)
class Room:
    """Bytes of one device.

    Attributes:
        total: bytes of its memory.
        fraction: share of memory that may be taken.
        taken: bytes of weights, and of all other data that is allocated before the cache.
        programs: the most bytes that programs need: activations, buffers, code.
    """

    total: int
    fraction: float
    taken: float
    programs: float

    @property
    def bytes(self) -> float:
        """Bytes left for the cache; negative if weights and programs do not fit."""
        return self.fraction * self.total - self.taken - self.programs

    def holds(self, size: int) -> int:
        """The number of tokens, or pages, of ``size`` bytes each."""
        return max(int(self.bytes // size), 0)

    def __str__(self) -> str:
        total, taken, programs = (f"{n / _GIB:.1f}" for n in (self.total, self.taken, self.programs))
        return f"{self.fraction:g} of {total} GiB, less {taken} in use and {programs} for programs"
