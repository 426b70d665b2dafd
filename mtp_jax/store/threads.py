"""Threads that do file work for one owner, whose end they do not hold up, nor the process's."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_Work = Callable[[], object]

# Seconds that the end of a process waits for work of ``at_exit``: a folder that has gone may never answer.
_LAST_SECONDS = 10.0


class FileThreads:
    """A few daemon threads that take functions in order. They end with the last reference to this object."""

    def __init__(self, count: int, name: str, *, at_exit: bool = False) -> None:
        """at_exit: the process waits at its end, for seconds at most, until all functions have returned."""
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._count, self._name, self._started = count, name, False
        weakref.finalize(self, self._queue.put, None).atexit = False
        if at_exit:
            _at_exit.add(self)

    def do(self, work: _Work) -> None:
        """Have a function called, which must not raise."""
        if not self._started:
            self._started = True
            for _ in range(self._count):
                threading.Thread(target=_run, args=(self._queue,), name=self._name, daemon=True).start()
        self._queue.put(work)

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all functions that were given so far have begun, and of one thread ended."""
        if self._started:
            ended = threading.Event()
            self.do(ended.set)
            ended.wait(seconds)


def _run(queue: "SimpleQueue[_Work | None]") -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # it may hold the last reference to the owner
    queue.put(None)  # for the next thread


_at_exit: "weakref.WeakSet[FileThreads]" = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + _LAST_SECONDS
    for threads in list(_at_exit):
        threads.finish(max(deadline - time.monotonic(), 0))
