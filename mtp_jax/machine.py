"""The computer that this process runs on, without jax: cores, memory, and the processor's instructions."""

import contextlib
import functools
import hashlib
import os
import platform
import re
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from sys import modules


def usable_cores() -> int:
    """The cores that this process may run on: the cores of its affinity mask, where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Where Linux says how much a container may take: control groups, version 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_size() -> int:
    """Bytes of memory that this computer has, or that this container may take."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _LIMITS):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            found.append(int(path.read_text()))
    return min(found)


@functools.cache
def processor_features() -> frozenset[str]:
    """The instruction sets of the processor as Linux names them; elsewhere its name alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset({platform.processor()})
    # x86 has "flags", ARM "Features": that of the first core.
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, platform.processor()).split())


def cpu_devices() -> int | None:
    """Devices of the processor that JAX counts, told without it; None where it may find other devices."""
    if "jax" in modules:  # which knows it, and may be configured otherwise
        return None
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = entry_points(group="jax_plugins") or find_spec("libtpu")
    if platforms != "cpu" and (platforms or plugins):
        return None
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = os.environ.get("JAX_NUM_CPU_DEVICES", forced[1] if forced else "1")
    return int(count) if count.isdecimal() else None


def converts_float16() -> bool:
    """Whether XLA can compile conversions of float16 for this processor.

    On x86 XLA needs F16C for them, which ``--xla_cpu_max_isa=SSE4_2`` in XLA_FLAGS forbids.
    """
    if "xla_cpu_max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", ""):
        return False
    features = processor_features()
    return "f16c" in features or "sse4_2" not in features


def program_folder() -> str:
    """The name of a folder for compiled programs that suit this process.

    XLA fixes, when it compiles for a CPU, which instructions a program uses and, by the usable cores, how
    many parts its loops have. JAX's key of a program does not hold the cores: one that is compiled on a
    single core and loaded where there are eight runs on one.
    """
    features = hashlib.sha256(" ".join(sorted(processor_features())).encode()).hexdigest()[:12]
    return f"jaxlib-{version('jaxlib')}-{platform.machine()}-{features}-cores-{usable_cores()}"
