"""Start-up progress: one line per phase with its seconds, and a bar where a person is waiting."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tqdm import tqdm

from mtp_jax.errors import amount

Advance = Callable[[int, int], None]
"""``update(done, total)``, in the phase's unit."""

_LINE_EVERY_SECONDS = 10.0
_REDRAW_EVERY_SECONDS = 1.0
_NOTHING_DONE_SECONDS = 0.5


class Reporter(Protocol):
    """A receiver of start-up phases."""

    def phase(self, name: str, unit: str = "") -> AbstractContextManager[Advance]:
        """A context that times one phase and yields its ``Advance``. Without a unit nothing is counted.

        unit: "B" for bytes, or a noun in the singular.
        """
        ...


class Silent:
    """Reports nothing: the default of the Python API."""

    @contextmanager
    def phase(self, name: str, unit: str = "") -> Iterator[Advance]:
        """Time nothing, show nothing."""
        del name, unit
        yield lambda done, total: None


class Terminal:
    """Lines on stderr; a bar while a phase runs if stderr is a terminal, else a line every 10 s.

    Attributes:
        started: ``time.perf_counter()`` at its creation.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str, unit: str = "") -> Iterator[Advance]:
        """Show progress of one phase, then its time. A short phase that counted nothing is not shown."""
        start = time.perf_counter()
        done, total = 0, 0
        bar = tqdm(
            desc=name, unit=unit or "it", unit_scale=unit == "B", leave=False, disable=not sys.stderr.isatty()
        )

        def update(now_done: int, now_total: int) -> None:
            nonlocal done, total
            bar.total = now_total
            bar.update(now_done - done)
            done, total = now_done, now_total

        def still_alive() -> None:
            # A compilation calls nobody for minutes; silence would look like a hang.
            if bar.disable:
                passed = time.perf_counter() - start
                so_far = f"{_amount(done, total, unit)}, " if total else ""
                _say(f"{name}: {so_far}{passed:.0f} s so far{_forecast(done, total, unit, passed)}")
            else:
                bar.refresh()

        try:
            with _every(_LINE_EVERY_SECONDS if bar.disable else _REDRAW_EVERY_SECONDS, still_alive):
                yield update
        finally:
            bar.close()
        seconds = time.perf_counter() - start
        if done or seconds > _NOTHING_DONE_SECONDS:
            _say(f"{name}{' ' + _amount(done, done, unit) if done else ''}: {seconds:.2f} s")

    def ready(self, summary: str) -> None:
        """The last line of start-up: a name, and the seconds since this object was made."""
        _say(f"ready in {time.perf_counter() - self.started:.2f} s: {summary}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece: another phase's thread may say something
    sys.stderr.flush()


@contextmanager
def _every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=run, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _forecast(done: int, total: int, unit: str, seconds: float) -> str:
    """Rate and time left, once a part is done and another is not."""
    if not (0 < done < total and seconds > 0):
        return ""
    rate = f"{_bytes(round(done / seconds))}/s" if unit == "B" else f"{done / seconds:.2g}/s"
    return f", {rate}, {left(seconds / done * (total - done))}"


def left(seconds: float) -> str:
    """A time to wait: "40 s left", "13 min left", "2.5 h left"."""
    if seconds < 100:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 6000 else f"{seconds / 3600:.1f} h left"


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "B":
        return _bytes(done) if done == total else f"{_bytes(done)} of {_bytes(total)}"
    return amount(total, unit) if done == total else f"{done} of {amount(total, unit)}"


def _bytes(count: int) -> str:
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} B"
