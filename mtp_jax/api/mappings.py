"""Memory mappings: a program that XLA compiles for a CPU takes hundreds; Linux allows a process only so many.

One that asks for more is aborted in the middle of compiling.
"""

from pathlib import Path


def room_for_programs(share: float = 0.7) -> bool:
    """Whether this process has less than ``share`` of the mappings the system allows; True without a limit.

    The limit is Linux' ``vm.max_map_count``.
    """
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines) < share * limit
    except (OSError, ValueError):
        return True
