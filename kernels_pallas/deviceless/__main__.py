"""Compile every case for an H200, print the compiler's decisions, and compare them with the budget.

The machine code, the PTX and the host code of each kernel are held against static rules.

The least time that the work takes on an H200 stands beside the time that a model predicts there, and the time
that was measured, with the card. Predicted steps of DeepSeek-V3 follow.

    python -m kernels_pallas.deviceless [PATTERN]

Needs the CUDA plugins of jax and NVIDIA's ptxas and nvdisasm, but neither a GPU nor a driver; ``make
gpu-compile`` installs them.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from kernels_pallas import absent
from kernels_pallas.check.case import Case
from kernels_pallas.check.device import RATES
from kernels_pallas.check.registry import cases
from kernels_pallas.deviceless import report, static, step, target
from kernels_pallas.deviceless.budget import Budget, budgets
from kernels_pallas.deviceless.prediction import predicted
from kernels_pallas.measured import measured

ROW = "{:48} {:>4} {:>6} {:>5} {:>16} {:>8} {:>8} {:>8} {:>8} {:>9} {:>11} {:>5}"
MIB = 2**20


def main() -> int:
    """Compile; returns 1 if a case exceeds its budget or breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.deviceless", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only cases whose names contain this")
    pattern = parser.parse_args().pattern
    chosen = [case for case in cases(pattern) if not case.small]
    if not chosen:
        print(f"no case has {pattern!r} in its name", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        target.prepare(dump)
        print(f"jax {jax.__version__}, {ptxas_release()}, for NVIDIA H200")
        print(
            ROW.format(
                *("case", "regs", "spills", "path", "tensor core", "smem KiB", "temp MiB", "launches"),
                *("floor us", "predicted", "measured us", "s"),
            )
        )
        limits = budgets()
        mesh = absent.mesh_of("h200")
        found = [check(case, limits[case.name.split("/")[0]], mesh, dump) for case in chosen]
    print("\n".join(step.lines()))
    faults = [fault for of_case, _ in found for fault in of_case]
    print(static.summary([held for _, held in found]))
    print("\n".join(faults) or f"{len(chosen)} cases within budget")
    return int(bool(faults))


def check(
    case: Case, budget: Budget, mesh: jax.sharding.Mesh, dump: Path
) -> tuple[list[str], static.Checked]:
    """Compile one case, print its line, and list the limits that it exceeds and the rules that it breaks."""
    started = time.perf_counter()
    shapes = target.replicated(jax.eval_shape(case.inputs, jax.random.key(0)), mesh)
    own = dump / case.name
    compiled = target.compile_for(mesh, case.kernel, *shapes, dump=own)
    seconds = time.perf_counter() - started
    kernels = report.kernels(own)
    temp, launches = report.temp_bytes(compiled) / MIB, len(report.launches(target.xla_dump(dump)))
    for i, k in enumerate(kernels):
        products = " ".join(f"{count} {name}" for name, count in sorted(k.instructions.items()))
        least, expected = RATES["H200"].floor(case.work), predicted(case, "H200")
        times = f"{least * 1e6:.1f}", f"{expected * 1e6:.1f}", measured(case.name)
        whole = (f"{temp:.1f}", launches, *times, f"{seconds:.0f}") if i == 0 else ("",) * 6
        shown = "-" if k.shared is None else f"{k.shared / 1024:.1f}"
        path = "-" if k.path is None else k.path
        print(ROW.format(case.name, k.registers, k.spills, path, products, shown, *whole), flush=True)
    limits = budget.of(case.name.split("/")[1])
    held = static.checked(own, kernels)
    shutil.rmtree(own)  # jax logs every pass over a kernel: up to 190 MB
    faults = (*limits.faults(kernels, temp, launches), *held.faults)
    return [f"{case.name}: {fault}" for fault in faults], held


def ptxas_release() -> str:
    """Release of the ptxas that compiles."""
    text = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    return next(line.split(",")[-1].strip() for line in text.splitlines() if "release" in line).replace(
        "V", "ptxas "
    )


if __name__ == "__main__":
    sys.exit(main())
