"""Ends a process whose engine is stuck in one step: a supervisor can start a new one.

While the whole process is paused (a signal, a frozen container or machine) its watchdog is, too: the time
between two looks counts as the usual interval at most.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from mtp_jax import AsyncLLM

_LOG = logging.getLogger(__name__)
_CHECKS_PER_LIMIT = 20
STUCK_STATUS = 70


class Watchdog:
    """A thread that looks at the age of the engine's step while its block runs."""

    def __init__(self, allm: AsyncLLM, limit: float, end: Callable[[int], object] = os._exit) -> None:
        """limit: seconds that a step may take. end: ends the process."""
        self._allm, self._limit, self._end = allm, limit, end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pause, looked = self._limit / _CHECKS_PER_LIMIT, time.monotonic()
        missed = 0.0  # seconds since the step began in which this thread did not run
        while not self._stop.wait(pause):
            before, looked = looked, time.monotonic()
            late, age = looked - before - pause, self._allm.step_age
            # The part of the pause in a step that began since is unknown; the step is spared all of it.
            missed = (missed if age > looked - before else 0.0) + (late if late > pause else 0.0)
            if age - missed > self._limit:
                self._report()
                self._end(STUCK_STATUS)
                return

    def _report(self) -> None:
        """Report the process's work: sizes and stacks, without text of requests."""
        _LOG.critical("the engine is in one step for %.0f s: %s", self._allm.step_age, self._allm.stats())
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
