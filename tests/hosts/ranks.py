"""Groups of processes for tests: each runs ``tests.hosts.worker`` with two CPU devices of its own."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax

ROOT = Path(__file__).parents[2]
DEVICES = 2


class Rank:
    """One process, and what it prints."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with its process
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )

    @property
    def text(self) -> str:
        """All that it has printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")

    def wait_for(self, words: str, seconds: float = 400) -> None:
        """Until it has printed these words. Raises AssertionError."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)


def two_free_ports() -> int:
    """A port that is free, and the one after it, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def ranks(
    arguments: Sequence[str],
    hosts: int = 2,
    others: Mapping[int, Mapping[str, str]] | None = None,
    **more: Any,
) -> Iterator[list[Rank]]:
    """So many processes of a group; what is left of them at the end is killed.

    arguments: of the Python interpreter; HOSTS, RANK and COORDINATOR in them are filled in.
    others: by rank, environment variables that differ. more: that all have.
    """
    shared = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "MTP_JAX_SECRET": secrets.token_hex(16),
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"] or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        **more,
    }
    coordinator, found = f"127.0.0.1:{two_free_ports()}", []
    try:
        for rank in range(hosts):
            filled = {"HOSTS": str(hosts), "RANK": str(rank), "COORDINATOR": coordinator}
            command = [sys.executable, "-u", *(filled.get(a, a) for a in arguments)]
            found.append(Rank(command, {**os.environ, **shared, **((others or {}).get(rank, {}))}))
        yield found
    finally:
        for rank in found:
            rank.process.kill()
            rank.process.wait()
            rank.log.close()
