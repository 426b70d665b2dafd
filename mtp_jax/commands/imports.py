"""Ctrl-C while modules are being imported ends the process without a word.

Python's own handler would raise an exception there, which prints a traceback, aborts the process from within
C++, or is lost where the garbage collector calls jax.
"""

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C has its default action while a module, with all that it imports, is executed.

    Not where the program has a handler of its own, or ignores Ctrl-C.
    """
    sys.meta_path.insert(0, _Outermost())


def _raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt, as Python has it."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Outermost:
    """Finds modules that are not imported by another one; the finders after it find all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.current_thread() is not threading.main_thread() or not _raises():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        execute(module)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
