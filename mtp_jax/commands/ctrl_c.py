"""Ctrl-C ends the process silently while modules are being imported, and is never lost.

Python's own handler would raise an exception within an import, which prints a traceback or aborts the process
from within C++. It also raises it where the garbage collector calls jax, and where an object is destroyed:
Python drops an exception there.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Seconds until the signal comes again. Within the hook, which takes microseconds, the exception would be
# dropped again; this delay is too short to notice.
_MOMENT = 0.05


def end_at_ctrl_c() -> None:
    """Give Ctrl-C its default action, from now on, while a module and the modules it imports are executed.

    A program that has a handler of its own, or ignores Ctrl-C, is not affected.
    """
    sys.meta_path.insert(0, _Outermost())


def repeat_lost_ctrl_c() -> None:
    """Repeat, a moment later, every Ctrl-C from now on whose exception Python had to drop."""
    others = sys.unraisablehook

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return others(dropped)
        main = threading.main_thread().ident
        again = threading.Timer(_MOMENT, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # Python is ending, and starts no thread
            again.start()

    sys.unraisablehook = hook


def _raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt, as Python has it."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Outermost:
    """Finds modules that are not imported by another module; the finders after it find the rest."""

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
