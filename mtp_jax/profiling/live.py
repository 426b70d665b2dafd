"""Phases of the steps of a running engine: every program that is used much is traced once, for a few steps.

Drafting, verification and acceptance are one program, so no clock stands between them. The shares of the
phases in a traced step divide the measured seconds of all steps of its program: an estimate, as tracing makes
small instructions slower, and as what a step does depends a little on its requests.
"""

import logging
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import jax

from mtp_jax.decode.keys import StepKey, name_of
from mtp_jax.engine.engine import Engine
from mtp_jax.profiling import trace
from mtp_jax.profiling.scopes import OTHER, STEP_PHASES, Scope, scopes_of
from mtp_jax.profiling.trace import Trace

_LOG = logging.getLogger(__name__)
_WINDOW = "mtp-jax live steps"
_LOOK_SECONDS = 2.0
_COMMON = 50  # steps of a program before it is worth a trace
_TRACED = 5
_ENOUGH = 3  # steps of a program in a trace, of which the first and the last may be cut
_TRACE_SECONDS = 2.0
_LONGEST_SECONDS = 30.0
_POLL_SECONDS = 0.005
_TRIES = 3


class PhaseProfiler:
    """A thread beside an engine's while its block runs. It writes ``Counters.phase_shares``.

    Steps of structured output are two programs with the host between them, and stay without shares.
    """

    def __init__(self, engine: Engine, ready: Callable[[], bool]) -> None:
        """ready: whether tracing may begin; not before everything is compiled, for one."""
        self._engine, self._ready = engine, ready
        self._tries: Counter[StepKey] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phases", daemon=True)

    def __enter__(self) -> "PhaseProfiler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before: Mapping[StepKey, int] = {}
        while not self._stop.wait(_LOOK_SECONDS):
            now = self._steps()
            active = [k for k in self._wanted(now) if now[k] > before.get(k, 0)]
            before = now
            if active and self._ready():
                try:
                    self._profile(max(active, key=lambda k: now[k]))
                except Exception:  # of what nothing else depends on; another profiler may be running
                    _LOG.warning("the phases of a step could not be profiled", exc_info=True)

    def _steps(self) -> dict[StepKey, int]:
        return {k: n for k, n in self._engine.counters.program_steps.copy().items() if isinstance(k, StepKey)}

    def _wanted(self, steps: Mapping[StepKey, int]) -> list[StepKey]:
        known = self._engine.counters.phase_shares
        common = [k for k, n in steps.items() if n >= _COMMON and self._tries[k] < _TRIES]
        return [k for k in common if k not in known and not k.mode.structured]

    def _profile(self, key: StepKey) -> None:
        """Trace a few steps of a program, and take the shares of all that took as many meanwhile.

        Slow steps get the time they need for the fewest that say something.
        """
        self._tries[key] += 1
        with tempfile.TemporaryDirectory() as folder:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with jax.profiler.trace(folder, profiler_options=options), jax.profiler.TraceAnnotation(_WINDOW):
                first, began, taken = self._steps(), time.monotonic(), 0
                while taken < _TRACED and not self._stop.is_set():
                    seconds = time.monotonic() - began
                    if seconds > (_TRACE_SECONDS if taken >= _ENOUGH else _LONGEST_SECONDS):
                        break
                    time.sleep(_POLL_SECONDS)
                    taken = self._steps()[key] - first[key]
                last = self._steps()
            (file,) = Path(folder).rglob("*.xplane.pb")
            found = trace.read(file, _WINDOW)
        for other in self._wanted(last):
            if last[other] - first.get(other, 0) >= _ENOUGH:
                text = self._engine.executables.program(other).as_text()
                module = f"jit_{name_of(other)}"
                self._engine.counters.phase_shares[other] = shares(found, module, scopes_of(text))


def shares(found: Trace, module: str, scopes: Mapping[str, Scope]) -> dict[str, float]:
    """Of the time in which instructions of a program ran, the share of each phase; they sum to 1."""
    seconds: dict[str, float] = defaultdict(float)
    for scope, nanoseconds in trace.by_scope(found, {module: scopes}).items():
        if scope.phase in (*STEP_PHASES, OTHER):
            seconds[scope.phase] += nanoseconds
    return {phase: s / sum(seconds.values()) for phase, s in seconds.items()}
