"""All cases of all kernels."""

from importlib import import_module

from kernels_pallas.checking.case import Case

# Folders of kernels_pallas with a cases.py.
KERNELS: tuple[str, ...] = (
    "mla_decode",
    "mla_prefill",
    "mla_low_rank",
    "mla_absorb",
    "rms_norm",
    "router",
    "expert_layout",
    "grouped_matmul",
    "fp8_matmul",
    "index_scores",
    "top_k",
)


def cases(*patterns: str) -> tuple[Case, ...]:
    """The cases whose names contain one of ``patterns``, or all, in the order of their declaration."""
    modules = [import_module(f"kernels_pallas.{kernel}.cases") for kernel in KERNELS]
    found = [module.case(name, shape) for module in modules for name, shape in module.shapes().items()]
    return tuple(c for c in found if not patterns or any(p in c.name for p in patterns))
