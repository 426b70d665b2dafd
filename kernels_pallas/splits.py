"""The number of parts into which a kernel splits the rows of a slot, so that a launch fills the GPU."""

CLUSTER = 8
"""Most thread blocks of a cluster on every GPU of the Hopper generation (CUDA C++ Programming Guide)."""
GROUPS = 7
"""Groups of multiprocessors (GPCs) that an H100 or H200 has at least; a cluster lies in one of them."""
PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200; a thread block of these kernels fills one."""


def choose_splits(blocks: int, steps: int, cost: int) -> int:
    """Number of splits that finishes soonest, for slots of ``steps`` steps.

    blocks: number of thread blocks without splits. cost: number of steps that a split costs beside its rows.
    """

    def time(splits: int) -> tuple[int, int]:
        waves = -(-blocks * splits // PROCESSORS)
        return waves * (-(-steps // splits) + cost), splits

    return min(range(1, min(steps, PROCESSORS) + 1), key=time)
