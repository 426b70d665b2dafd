"""Ctrl-C as a flag, for work that an exception in its midst would leave broken."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Flag:
    """Whether Ctrl-C has been pressed."""

    def __init__(self) -> None:
        self._pressed = False

    def press(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler. A second time, while the first is not heeded yet, it interrupts after all."""
        if self._pressed:
            signal.default_int_handler(signum, frame)
        self._pressed = True

    def is_set(self) -> bool:
        """Whether to stop at the next good moment."""
        return self._pressed


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Ctrl-C sets a flag instead of raising KeyboardInterrupt. Only the main thread is ever interrupted."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.signal(signal.SIGINT, flag.press)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
