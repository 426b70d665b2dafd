"""The end of a process whose group cannot go on: one log line, messages to the other ranks, and the exit.

A part of a group cannot serve. Work of its devices cannot be undone, and JAX's own shutdown would wait for
lost ranks, so the process ends at once, and the supervisor of the ranks starts all of them again.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from mtp_jax.errors import EngineStopped

_LOG = logging.getLogger(__name__)
STATUS = 70  # EX_SOFTWARE of sysexits.h: supervisors tell it from a refused command line
_LAST_ANSWERS_SECONDS = 1.0  # for errors on their way to clients
# The end of a peer is an error of a collective first, and then the end of its connection, which names it.
_NAMED_SECONDS = 0.3


class Ending:
    """Ends this process once.

    Attributes:
        told: functions called with the error before the end; they have a second to pass it on.
    """

    def __init__(self, name: str, end: Callable[[int], object] = os._exit) -> None:
        """name: the name of this process in its last log line, such as "rank 1 of 4"."""
        self.told: list[Callable[[EngineStopped], None]] = []
        self._name, self._end = name, end
        self._lock, self._begun = threading.Lock(), False

    def wait_if_begun(self) -> None:
        """Wait for the process's end if it has begun, so that it ends with its own status."""
        if self._begun:
            threading.Event().wait()

    def __call__(self, reason: str) -> None:
        """End the process; a second caller waits for the end."""
        with self._lock:
            first, self._begun = not self._begun, True
        if not first:
            threading.Event().wait()
        line = " ".join(reason.split())
        _LOG.critical("%s ends: %s", self._name, line)
        for tell in self.told:
            with suppress(Exception):
                tell(EngineStopped(f"the engine failed: {line}"))
        if self.told:
            time.sleep(_LAST_ANSWERS_SECONDS)
        with suppress(Exception):
            sys.stdout.flush()
        self._end(STATUS)

    def on_error(self, doing: str) -> "_OnError":
        """A context that ends the process if its block raises: this rank has fallen behind the rest."""
        return _OnError(self, doing)


class _OnError:
    def __init__(self, ending: Ending, doing: str) -> None:
        self._ending, self._doing = ending, doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            time.sleep(_NAMED_SECONDS)
            self._ending(f"{self._doing}: {type(error).__name__}: {error}"[:500])
