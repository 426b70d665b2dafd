"""Start-up progress: one line per phase with its seconds, and a bar where a person is waiting."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

Update = Callable[[int, int], None]
"""``update(done, total)``, in the phase's unit."""

_LINE_EVERY_SECONDS = 10.0


class Reporter(Protocol):
    """Where start-up phases are reported."""

    def phase(self, name: str, unit: str = "") -> "contextmanager[Update]":  # type: ignore[type-arg]
        """A context that times one phase and yields its ``Update``."""
        ...


class Silent:
    """Reports nothing: the default of the Python API."""

    @contextmanager
    def phase(self, name: str, unit: str = "") -> Iterator[Update]:
        """Time nothing, show nothing."""
        del name, unit
        yield lambda done, total: None


class Terminal:
    """Lines on stderr; a bar while a phase runs if stderr is a terminal, else a line every 10 s."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str, unit: str = "") -> Iterator[Update]:
        """Show progress of one phase, then its time and the time since the process's start-up began."""
        start = time.perf_counter()
        bar = tqdm(
            desc=name, unit=unit or "it", unit_scale=unit == "B", leave=False, disable=not sys.stderr.isatty()
        )
        last, seen = start, 0

        def update(done: int, total: int) -> None:
            nonlocal last, seen
            bar.total = total
            bar.update(done - seen)
            seen = done
            now = time.perf_counter()
            if bar.disable and now - last > _LINE_EVERY_SECONDS:
                print(f"{name}: {_amount(done, unit)} of {_amount(total, unit)}", file=sys.stderr, flush=True)
                last = now

        try:
            yield update
        finally:
            bar.close()
        amount = f" {_amount(seen, unit)}" if seen else ""
        seconds = time.perf_counter() - start
        print(f"{name}{amount}: {seconds:.2f} s", file=sys.stderr, flush=True)


def _amount(count: int, unit: str) -> str:
    if unit != "B":
        return f"{count} {unit}".rstrip()
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} B"
