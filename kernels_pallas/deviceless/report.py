"""The compiler's decisions: registers, spills, tensor-core instructions, memory, launches."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax

# Names of tensor-core instructions on Hopper: bfloat16 and FP8 by warpgroup; by warp, which is slower.
_TENSOR_CORE = re.compile(r"\b(HGMMA|QGMMA|HMMA)\b")
_SHARED = r"smem_scratch_bytes=(\d+)"
# A label and an instruction of the machine code, and the label that an instruction names.
_SASS = re.compile(r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/\s+(\S.*)")
_TARGET = re.compile(r"\((\.L\w+)\)")
# The largest or least of a warp's unsigned numbers. The kernels have none, but jax may forget a sign.
_UNSIGNED = re.compile(r"\bREDUX\.(?:MAX|MIN)\b(?!\.S32)")
# ptxas's warnings that warpgroup products run one after the other.
_SERIALISED = re.compile(r"\(C751\d\)")
# Lines of XLA's launch list that launch work on the GPU; a collective has a start and an end, and a kernel
# that reads or writes a slice has a line of its own below the slice's.
_LAUNCH = re.compile(r"^\s*\d+: k(?!Sequential|Conditional|While|WaitForStreams|Async|DynamicSliceFusion)")
# A launch's kernel; an instruction of a module: its name, its operation, the rest of the line.
_NAME = re.compile(r"\] +(\S+)")
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?([\w.-]+) = [^=]*? ([\w-]+)\((.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One Mosaic GPU kernel.

    Attributes:
        registers: number of registers per thread at launch; warpgroups exchange them afterwards.
        spills: bytes each thread stores to local memory for want of registers.
        shared: bytes of shared memory per thread block; None where jax does not say (0.10).
        instructions: tensor-core instructions by name, as written, not as executed.
        serialised: whether ptxas warned that it could not overlap warpgroup products.
        path: number of instructions on a warp's longest path; None if the code loops or calls.
        unsigned: number of instructions that find the largest or least of unsigned numbers.
    """

    name: str
    registers: int
    spills: int
    shared: int | None
    instructions: Counter[str]
    serialised: bool
    path: int | None
    unsigned: int


def kernels(dump: Path) -> tuple[Kernel, ...]:
    """The kernels that a compilation left in its dump."""
    return tuple(_kernel(log) for log in sorted(dump.glob("*.ptxas")))


def _kernel(log: Path) -> Kernel:
    text = log.read_text(encoding="utf-8")
    sass = log.with_suffix(".sass_ctrl").read_text(encoding="utf-8")
    resources = log.with_suffix(".resources.txt")
    return Kernel(
        name=log.stem,
        registers=_number(r"Used (\d+) registers", text),
        spills=_number(r"(\d+) bytes spill stores", text),
        shared=_number(_SHARED, resources.read_text(encoding="utf-8")) if resources.exists() else None,
        instructions=Counter(_TENSOR_CORE.findall(sass)),
        serialised=bool(_SERIALISED.search(text)),
        path=_path(sass),
        unsigned=len(_UNSIGNED.findall(sass)),
    )


def _path(sass: str) -> int | None:
    """Instructions of code that only branches forward, all of them but padding; None for other code."""
    labels: dict[str, int] = {}
    count = 0
    for label, instruction in (m.groups() for m in map(_SASS.search, sass.splitlines()) if m):
        if label:
            labels[label] = count
            continue
        target = _TARGET.search(instruction)
        # Code ends with a branch to itself, which no warp reaches.
        if re.search(r"\b(CALL|RET|BRX|JMX)\b", instruction) or (
            target and labels.get(target[1], count) < count
        ):
            return None
        count += not re.search(r"\bNOP\b", instruction) and not (target and target[1] in labels)
    return count


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's log has no {pattern!r}; it begins: {text[:200]!r}")
    return int(found[1])


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory beside arguments and results."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the compiler gives no memory analysis")
    return analysis.temp_size_in_bytes


def purposes(launches: tuple[str, ...], hlo: str) -> tuple[str, ...]:
    """The name scopes of each launch's computation, by the compiled module; "" where XLA kept none."""
    names: dict[str, str] = {}
    calls: list[str] = []
    for name, operation, rest in _INSTRUCTION.findall(hlo[hlo.index("\nENTRY") :]):
        found = re.search(r'op_name="(?:jit\([^"]*?\)/)?([^"]*)"', rest)
        names[_launched(name)] = found[1] if found else ""
        if operation == "custom-call":
            calls.append(names[_launched(name)])
    # Launches of custom calls have no names, only an order.
    in_order = iter(calls)
    return tuple(
        next(in_order, "") if "kCustomCall" in line else names.get(_launched(kernel_name(line)), "")
        for line in launches
    )


def kernel_name(launch: str) -> str:
    """XLA's name of a launch's kernel."""
    return _NAME.findall(launch)[0]


def _launched(name: str) -> str:
    """The name of an instruction, as XLA names its kernel."""
    return re.sub(r"[.-]", "_", name)


def launches(xla_dump: Path) -> tuple[str, ...]:
    """The launches that the module compiled last puts on the GPU, in order."""
    lists = sorted(xla_dump.glob("*thunk_sequence.txt"), key=lambda path: path.stat().st_mtime_ns)
    lines = lists[-1].read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if _LAUNCH.match(line))


def entries(xla_dump: Path) -> int:
    """The number of graphs and of launches outside of graphs in the module compiled last."""
    lists = sorted(xla_dump.glob("*after_thunk_passes.txt"), key=lambda path: path.stat().st_mtime_ns)
    return sum(line[:1].isdigit() for line in lists[-1].read_text(encoding="utf-8").splitlines())
