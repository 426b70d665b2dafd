"""Limits of each kernel in the GPU-less compile; budget.toml holds them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kernels_pallas.deviceless.report import Kernel
from kernels_pallas.mosaic import SHARED

FILE = Path(__file__).with_name("budget.toml")


@dataclass(frozen=True)
class Budget:
    """The most that every case of a kernel may use.

    Attributes:
        spills: most bytes that a thread spills.
        instructions: tensor-core instructions that must occur.
        temp_mib: MiB of device memory beside arguments and results.
        launches: number of launches of the whole operation.
        cases: limits of single cases that differ.
        path: most instructions on a warp's longest path; None: any number.
    """

    spills: int
    instructions: tuple[str, ...]
    temp_mib: float
    launches: int
    cases: dict[str, dict[str, float]] = field(default_factory=dict)
    path: int | None = None

    def of(self, shape: str) -> "Budget":
        """The budget of one case."""
        return Budget(**{**vars(self), **self.cases.get(shape, {}), "cases": {}})

    def faults(self, kernels: tuple[Kernel, ...], temp_mib: float, launches: int) -> Iterator[str]:
        """Sentences about the limits that a compile exceeds."""
        if not kernels:
            yield "no Mosaic GPU kernel was compiled"
        for k in kernels:
            if k.spills > self.spills:
                yield f"{k.spills} bytes of spills, at most {self.spills}"
            if self.path is not None and (k.path is None or k.path > self.path):
                yield f"{k.path or 'an unknown number of'} instructions on a path, at most {self.path}"
            if k.unsigned:
                yield f"{k.unsigned} extremes of unsigned numbers; see ``kernels_pallas.mosaic.signed``"
            if k.serialised:
                yield "ptxas warns of serialised warpgroup products"
            if k.shared is not None and k.shared > SHARED:
                yield f"{k.shared} bytes of shared memory, at most {SHARED}"
        found = set().union(*(k.instructions for k in kernels))
        if missing := set(self.instructions) - found:
            yield f"no {', '.join(sorted(missing))}"
        if temp_mib > self.temp_mib:
            yield f"{temp_mib:.1f} MiB of temporary memory, at most {self.temp_mib}"
        if launches > self.launches:
            yield f"{launches} launches, at most {self.launches}"


@cache
def budgets() -> dict[str, Budget]:
    """Budgets by kernel."""
    with FILE.open("rb") as file:
        return {kernel: Budget(**limits) for kernel, limits in tomllib.load(file).items()}
