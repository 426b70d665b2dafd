"""Registers that a warp uses after a change of their number, held against the new number.

Source: PTX ISA, ``setmaxnreg``. A register beyond the number belongs to another warp.
"""

import re
from collections.abc import Iterable, Iterator

from kernels_pallas.deviceless.flow import Code, Instruction

# ``setmaxnreg`` in machine code: gives registers up, or asks for some until it gets them.
_SETS = "USETMAXREG"
_COUNT = re.compile(r"0x([0-9a-f]+)\s*$")
# A register of a thread, not one of the warp (UR) nor the zero register (RZ); two of them make an address.
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_PREDICATE = re.compile(r"\s*!?U?P[\dT]")
_ADDRESS = re.compile(r"\[[^\]]*\]")
# Loads and stores of several words, by qualifier; transposed matrices, by their number.
_MEMORY = re.compile(r"(?:LD|ST)[A-Z]*\b.*?\.(64|128|M88\.2|M88\.4)\b")
_WORDS = {"64": 2, "128": 4, "M88.2": 2, "M88.4": 4}
# Warpgroup products: columns and type of the sums.
_PRODUCT = re.compile(r"[HQI]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(F32|S32|F16)")
# Rows times columns of a product over the threads of a warpgroup, by numbers in a register.
_SUMS = {"F32": 2, "S32": 2, "F16": 4}
# Registers of an operand of 64 rows that is not in shared memory.
_OPERAND = 4


def faults(code: Code, asked: list[int], at_launch: int) -> Iterator[str]:
    """Sentences about registers beyond a warp's number.

    Args:
        code: the machine code.
        asked: the numbers that the PTX asks for.
        at_launch: number of registers of each thread when the kernel starts.
    """
    found = {i: _count(x) for i, x in enumerate(code) if x.name.startswith(_SETS)}
    if set(found.values()) != set(asked):
        yield (
            f"setmaxnreg: the machine code sets {_listed(found.values())} registers, "
            f"the PTX asks for {_listed(asked)}; ptxas drops requests that it cannot grant"
        )
    for i, count in found.items():
        place = f"setmaxnreg at {code[i].place}"
        gives = "DEALLOC" in code[i].name
        if (count > at_launch) if gives else (count < at_launch):
            bound = "most" if gives else "least"
            yield f"{place}: sets {count} registers, at {bound} {at_launch}, the number at launch"
        highest, where = max(_used(code, i), default=(-1, ""))
        if highest >= count:
            yield f"{place}: R{highest} is used at {where}, at most R{count - 1}"


def asked(code: Code) -> list[int]:
    """The numbers of registers that PTX asks for."""
    return [int(x.operands) for x in code if x.name.startswith("setmaxnreg")]


def _count(instruction: Instruction) -> int:
    found = _COUNT.search(instruction.operands)
    if found is None:
        raise ValueError(f"{instruction.place}: {instruction.name} {instruction.operands!r} names no number")
    return int(found[1], 16)


def _used(code: Code, start: int) -> Iterator[tuple[int, str]]:
    """The highest register of each instruction between one change of the number and the next."""
    seen: set[int] = set()
    ahead = [*code[start].after]
    while ahead:
        i = ahead.pop()
        if i in seen or code[i].name.startswith(_SETS):
            continue
        seen.add(i)
        ahead.extend(code[i].after)
        if (highest := last_register(code[i])) is not None:
            yield highest, f"{code[i].place} ({code[i].name})"


def last_register(instruction: Instruction) -> int | None:
    """The highest register that an instruction reads or writes; None: it has no register."""
    name, operands = instruction.name, instruction.operands
    last = [int(n) + bool(pair) for n, pair in _REGISTER.findall(operands)]
    values = [int(n) for n, _ in _REGISTER.findall(_ADDRESS.sub("", operands))]
    if values and (product := _PRODUCT.match(name)):
        last.append(values[0] + int(product[1]) // _SUMS[product[2]] - 1)
        if re.match(r"R\d+, R\d+.*gdesc", operands):
            last.append(values[1] + _OPERAND - 1)
    elif values and (memory := _MEMORY.match(name)):
        last.append(max(values) + _WORDS[memory[1]] - 1)
    elif values and (".WIDE" in name or name == "CS2R"):
        # The result and the addend, the fourth operand, are pairs; the factors between them are not.
        numbers = [x for x in operands.split(",") if not _PREDICATE.match(x)]
        last.extend(int(n) + 1 for x in numbers[0:4:3] for n, _ in _REGISTER.findall(x))
    return max(last, default=None)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers)))) or "no"
