"""Commands that run on Ray, as processes, and those of Ray that belong to them."""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.ranks import Rank

ROOT = Path(__file__).parents[3]


def of_ray(pid: int, words: str) -> list[int]:
    """The processes below another one whose command line has these words."""
    below = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            below[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found, left = [], [pid]
    while left:
        for child in below[left.pop()]:
            left.append(child)
            try:
                if words in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(child)
            except OSError:
                continue
    return sorted(found)


@contextmanager
def command(arguments: Sequence[str], home: Path, **more: str) -> Iterator[Rank]:
    """`mtp-jax` with a cluster of its own, which ends with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        **more,
    }
    running = Rank([sys.executable, "-u", "-m", "mtp_jax", *arguments], environment)
    try:
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        running.log.close()


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Until it holds. Raises AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
