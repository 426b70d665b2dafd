"""Every static rule, held in the kernels that a compilation left in its dump."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels_pallas.deviceless import barriers, fences, flow, host_rules, registers
from kernels_pallas.deviceless.flow import Code
from kernels_pallas.deviceless.host_rules import Host
from kernels_pallas.deviceless.report import Kernel

# Copies that read a descriptor.
_TMA = re.compile(r"cp\.(reduce\.)?async\.bulk\.(prefetch\.)?tensor\.")


@dataclass(frozen=True)
class Checked:
    """Numbers of things held against the rules, seconds, and sentences about the rules that are broken."""

    kernels: int
    descriptors: int
    launches: int
    seconds: float
    faults: tuple[str, ...]


def checked(dump: Path, kernels: tuple[Kernel, ...]) -> Checked:
    """Hold the rules in each kernel of a dump, whose files have the kernel's name."""
    started = time.perf_counter()
    descriptors = launches = 0
    faults: list[str] = []
    for kernel in kernels:
        host, found = _held(dump / kernel.name, kernel.registers)
        descriptors += len(host.descriptors)
        launches += len(host.launches)
        faults.extend(f"{kernel.name}: {fault}" for fault in found)
    return Checked(len(kernels), descriptors, launches, time.perf_counter() - started, tuple(faults))


def summary(held: Sequence[Checked]) -> str:
    """One line about all cases."""
    kernels, descriptors, launches, faults = (
        sum(numbers)
        for numbers in zip(
            *((h.kernels, h.descriptors, h.launches, len(h.faults)) for h in held), strict=True
        )
    )
    return (
        f"static rules: {kernels} kernels, {descriptors} TMA descriptors, {launches} launches, "
        f"{faults} faults, in {sum(h.seconds for h in held):.1f} s"
    )


def _held(kernel: Path, at_launch: int) -> tuple[Host, list[str]]:
    """The host code that was checked, and sentences about broken rules."""
    paths = [kernel.with_name(kernel.name + end) for end in (".ll", ".ptx", ".sass_ctrl", ".resources.txt")]
    if missing := [path.name for path in paths if not path.exists()]:
        return Host((), ()), [
            f"no {', '.join(missing)}: the rules read the files that jax 0.11.2 dumps; use it"
        ]
    llvm, ptx, sass, resources = (path.read_text(encoding="utf-8") for path in paths)
    try:
        host = host_rules.parse(llvm)
        return host, list(_faults(host, flow.ptx(ptx), flow.sass(sass), resources, at_launch))
    except ValueError as e:
        return Host((), ()), [str(e)]


def _faults(host: Host, ptx: Code, sass: Code, resources: str, at_launch: int) -> Iterator[str]:
    for i, descriptor in enumerate(host.descriptors):
        yield from (f"TMA descriptor {i}: {fault}" for fault in descriptor.faults())
    if not host.descriptors and any(_TMA.match(x.name) for x in ptx):
        yield "the PTX copies by TMA, but the host code makes no TMA descriptor"
    if len(host.launches) != 1:
        yield f"the host code launches {len(host.launches)} kernels, allowed 1"
    for launch in host.launches:
        yield from (f"launch: {fault}" for fault in launch.faults(at_launch))
        yield from barriers.faults(ptx, resources, launch.cluster)
    yield from registers.faults(sass, registers.asked(ptx), at_launch)
    yield from fences.faults(ptx)
