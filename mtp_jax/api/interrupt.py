"""Ctrl-C as a flag, for work that an exception would leave half done."""

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
        """The signal handler. A second press before the flag was read interrupts at once."""
        if self._pressed:
            signal.default_int_handler(signum, frame)
        self._pressed = True

    def is_set(self) -> bool:
        """Whether to stop at the next good moment."""
        return self._pressed


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Ctrl-C sets a flag instead of raising KeyboardInterrupt.

    Has no effect in threads other than the main thread, within another such block, or beside a program's
    handler.
    """
    flag = Flag()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield flag
        return
    signal.signal(signal.SIGINT, flag.press)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
