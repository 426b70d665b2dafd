"""All cases of all kernels."""

from importlib import import_module

from kernels_pallas import KERNELS
from kernels_pallas.check.case import Case


def cases(*patterns: str) -> tuple[Case, ...]:
    """The cases whose names contain one of ``patterns``, or all, in the order of their declaration."""
    modules = [import_module(f"kernels_pallas.check.cases.{kernel}") for kernel in KERNELS]
    found = [module.case(name, shape) for module in modules for name, shape in module.shapes().items()]
    return tuple(c for c in found if not patterns or any(p in c.name for p in patterns))
