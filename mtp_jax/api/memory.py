"""System memory of this process: resident bytes and mappings.

A program that XLA compiles for a CPU takes hundreds of mappings: three per kernel, for code, constants and
data. Linux limits the mappings of a process, and aborts one that asks for more while it compiles.
"""

import ctypes
import gc
import re
from pathlib import Path

_PROC = Path("/proc/self")


def room_for_programs(share: float = 0.7) -> bool:
    """Whether this process has less than ``share`` of the mappings the system allows; True without a limit.

    The limit is Linux' ``vm.max_map_count``.
    """
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return True
    return mappings() < share * limit


def mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    try:
        with (_PROC / "maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def return_free_memory() -> None:
    """Return free memory, which the C library's allocator would keep, to the system, where it can.

    The compiler needs several times the memory that a finished program holds, and the program's sources are
    garbage in cycles.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
