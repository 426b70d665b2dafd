"""Warm-up of a server: a few programs are compiled before it is ready, further programs while it is idle."""

import logging
import threading
import time
from collections.abc import Callable

from mtp_jax.api.memory import mappings, resident_bytes, return_free_memory, room_for_programs
from mtp_jax.decode.keys import Key
from mtp_jax.engine.engine import Engine

_LOG = logging.getLogger(__name__)


class WarmUp:
    """Compiles a server's programs, most of them on a thread of its own, while ``idle`` is set.

    A server that is never idle must not keep to the few large programs for ever: each time that it has been
    busy for as long as the first programs took to compile, one more is compiled beside its work. Not so on a
    GPU, where the graphs of all programs are recorded anew after each that is compiled: there nothing is
    compiled beside requests, and a router sends none before the last program is there (``keeps_away``).
    """

    def __init__(
        self,
        engine: Engine,
        idle: threading.Event,
        warm_up: Callable[[Key], None],
        ended: Callable[[], None],
    ) -> None:
        """``warm_up`` runs a new program once, on the engine's thread. ``ended`` is called after the last
        program.
        """
        self._engine, self._idle, self._warm_up, self._ended = engine, idle, warm_up, ended
        self._first, self._rest = engine.warm_up_keys()
        self._done, self._seconds, self._resident = 0, 0.0, resident_bytes()
        self._apart, self._patience = not engine.runner.traits.by_rows, 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)

    def first(self, update: Callable[[int, int], None]) -> None:
        """Compile programs that serve anything, and run them once. ``update(i, n)``: i of n are compiled."""
        self._compile(self._first, update)
        self._patience = self._seconds
        self._engine.warm_up(self._first)

    def start(self) -> None:
        """Compile the other programs in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Start no further compilation, without waiting for the one in progress."""
        self._closing.set()
        self._idle.set()

    @property
    def running(self) -> bool:
        """Whether programs are still to be compiled in the background."""
        return self._thread.is_alive()

    @property
    def keeps_away(self) -> bool:
        """Whether requests should go elsewhere now, as they would wait for programs, or these for them."""
        return self._apart and self.running

    @property
    def state(self) -> str:
        """ "starting", "compiling program n of m" (or loading it), or "ready" once no further one comes."""
        if self._thread.ident is None:
            return "starting"
        total = len(self._first) + len(self._rest)
        return f"compiling program {self._done + 1} of {total}" if self.running else "ready"

    def _compile(self, keys: list[Key], update: Callable[[int, int], None] | None = None) -> None:
        began = time.perf_counter()
        self._engine.runner.compile(keys, update)
        return_free_memory()
        self._seconds += time.perf_counter() - began
        self._done += len(keys)

    def _run(self) -> None:
        self._compile_rest()
        if self._rest and not self._closing.is_set():
            self._ended()

    def _compile_rest(self) -> None:
        for key in self._rest:
            self._idle.wait(None if self._apart else self._patience)
            if self._closing.is_set():
                return
            if not room_for_programs():
                _LOG.warning(
                    "no further programs are compiled: the process has nearly as many memory mappings as the "
                    "system allows; larger programs serve instead (sysctl vm.max_map_count=262144 helps)"
                )
                return
            try:
                self._compile([key])
                self._warm_up(key)
            except Exception:  # the compiled programs serve everything
                if not self._closing.is_set():
                    _LOG.exception("a program is not ready, and others do its work")
        _LOG.info(
            "%d programs are ready: %.0f s, %.0f MB of memory more than before; %d memory mappings",
            self._done,
            self._seconds,
            (resident_bytes() - self._resident) / 1e6,
            mappings(),
        )
