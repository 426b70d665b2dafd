"""A record of compilations with their times, as none may fall into the measured time."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Compilation:
    """A compilation, or a program read from the compile cache.

    Attributes:
        program: the function's name, such as ``jit(step_b8_k3_p16)``.
        seconds: seconds that it took.
        ended: ``time.perf_counter()`` at its end.
    """

    program: str
    seconds: float
    ended: float


@contextmanager
def recorded() -> Iterator[list[Compilation]]:
    """A list that grows by every compilation of this process until the context ends."""
    found: list[Compilation] = []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == _COMPILED:
            found.append(Compilation(str(about.get("fun_name", "?")), duration_secs, time.perf_counter()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def write(compiles: list[Compilation], path: Path) -> None:
    """One JSON object per line, in order."""
    path.write_text("".join(json.dumps(asdict(c)) + "\n" for c in compiles), encoding="utf-8")
