"""From starting the process to the first byte of text, with an empty and with a filled compile cache."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from mtp_jax.bench.report import Report, Spread
from mtp_jax.bench.subject import DEMO
from mtp_jax.errors import MtpJaxError


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process to the first byte on stdout and to its end; its stderr."""

    first_byte: float
    end: float
    log: str


def start(command: list[str], home: str) -> Start:
    """Run ``command`` with ``home`` as home directory, where the compile cache lies. Raises MtpJaxError."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=os.environ | {"HOME": home}
        )
        assert process.stdout is not None
        with process:
            first = os.read(process.stdout.fileno(), 1)
            first_byte = time.perf_counter() - began
            while os.read(process.stdout.fileno(), 1 << 16):
                pass
        end = time.perf_counter() - began
        log.seek(0)
        messages = log.read().decode(errors="replace")
    if process.returncode or not first:
        raise MtpJaxError(f"{' '.join(command)} ended with {process.returncode}:\n{messages.strip()}")
    return Start(first_byte, end, messages)


def run(model: str, repeats: int, prompt: str, max_tokens: int) -> Report:
    """Per repeat a fresh home directory: the first run there is the cold one, the second the warm one."""
    given = [] if model == DEMO else [model]
    command = [sys.executable, "-m", "mtp_jax", "generate", *given]
    command += ["--prompt", prompt, "--max-tokens", str(max_tokens)]
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as home:
            cold.append(start(command, home))
            warm.append(start(command, home))
    rows, figures = [], {}
    for name, runs in (("empty", cold), ("filled", warm)):
        first, end = Spread.of([r.first_byte for r in runs]), Spread.of([r.end for r in runs])
        rows.append((name, first.show(), end.show()))
        figures[name] = {"first_byte_seconds": first, "end_seconds": end, "log": runs[-1].log}
    headers = ("compile cache", "first text, s (quartiles)", "process end, s")
    notes = [f"{repeats} runs each of: {shlex.join(command)}"]
    return Report(f"Start-up: {model}", headers, rows, notes, figures)
