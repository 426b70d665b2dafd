"""CPU time of every test file, in units that machines of different speed share, and its budget.

A unit is the CPU time of ``calibrate``, which traces and compiles as tests do: about a second on a slow
machine. ``cpu_budget.toml`` has the units of each file's tests in ``make test`` and in ``make test-all``,
alone with an empty compile cache or, of small files, 1.5 times their part of a whole run. A run fails if a
file takes ``FREE`` more than ``NOISE`` times as much.
``pytest --lower-cpu-budget`` writes the figures of a run where they are lower.
"""

import math
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

BUDGET = Path(__file__).with_name("cpu_budget.toml")
PARTS = ("test", "rest")
# Neighbours on a shared machine take caches and memory bandwidth from a process, which then needs more CPU
# time for the same work.
NOISE = 2.0
# Units beside any budget: imports, threads of servers that earlier files started, and processes that they
# started and that end here.
FREE = 10.0

# Units that somebody who changes a file, or a room, waits for in `make test`, in one process.
FILE, ROOM = 30.0, 120.0

Units = Mapping[str, Mapping[str, float]]


def calibrate() -> float:
    """CPU seconds that one unit takes here. jax must be set up as for tests."""
    import jax
    import jax.numpy as jnp

    def compile_one(size: int) -> None:
        x = jax.ShapeDtypeStruct((size, size), jnp.float32)
        jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x) + jnp.cumsum(x, 1)).argmax(0)).lower(x).compile()

    # On a busy machine these small programs take long enough for the compile cache, and no time from then on.
    least = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, least)
    jax.config.update(least, math.inf)
    compile_one(1)  # jax starts its devices
    begin = time.process_time()
    for size in range(2, 16):
        compile_one(size)
    jax.config.update(least, before)
    return time.process_time() - begin


def read_budget() -> Units:
    """{part: {file: units}}."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def lowered(budget: Units, measured: Units) -> Units:
    """The budget with the files of a run in it: new ones as measured, the others where they took less."""

    def least(had: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
        return {file: min(a[file] for a in (had, found) if file in a) for file in sorted({*had, *found})}

    return {part: least(budget[part], measured[part]) for part in PARTS}


def text(budget: Units) -> str:
    """The file's contents."""
    lines = ["# Units of CPU time that each test file takes: cpu_time.py. A number may only fall."]
    for part in PARTS:
        lines += ["", f"[{part}]", *(f'"{file}" = {units:.1f}' for file, units in budget[part].items())]
    return "\n".join(lines) + "\n"


def too_much(budget: Units, measured: Units) -> list[str]:
    """A line for every file, and every room, that takes more than it may."""
    rooms: defaultdict[str, float] = defaultdict(float)
    for file, units in measured["test"].items():
        rooms["/".join(Path(file).parts[:2])] += units
    spent = [
        (part, file, units, budget[part].get(file))
        for part in PARTS
        for file, units in measured[part].items()
    ]
    spent += [("test", room, units, ROOM) for room, units in rooms.items() if not room.endswith(".py")]
    return [
        f"{name} took {units:.1f} units of CPU time in `{part}`; its budget is {most:.1f} (tests/cpu_time.py)"
        for part, name, units, most in spent
        if most is not None and units > NOISE * most + FREE
    ]


def _spent() -> float:
    """CPU seconds of this process and of the processes that it has waited for."""
    return sum(os.times()[:4])


class CpuTime:
    """Measures the files of a run, and fails it if one takes too much."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.unit = config, 0.0
        self.seconds = defaultdict[tuple[str, str], float](float)
        self.measured: dict[str, dict[str, float]] = {part: {} for part in PARTS}
        self.faults: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self.unit:
            self.unit = calibrate()
        begin = _spent()
        done = yield
        file = item.path.relative_to(self.config.rootpath).as_posix()
        part = "rest" if item.get_closest_marker("rest") else "test"
        self.seconds[part, file] += 0 if item.get_closest_marker("slow") else _spent() - begin
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output["units"] = self.units()
            return
        self.add(self.units())
        self.faults = too_much(read_budget(), self.measured)
        if self.config.getoption("lower_cpu_budget"):
            BUDGET.write_text(text(lowered(read_budget(), self.measured)), encoding="utf-8")
        elif self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.add(getattr(node, "workeroutput", {}).get("units", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        most = sorted(
            ((n, file, part) for part in PARTS for file, n in self.measured[part].items()), reverse=True
        )
        whole = sum(n for n, *_ in most)
        terminalreporter.write_sep("=", f"{whole:.0f} units of CPU time (tests/cpu_time.py)")
        for units, file, part in most[:10]:
            terminalreporter.write_line(f"{units:6.1f} {file} ({part})")
        for fault in self.faults:
            terminalreporter.write_line(fault, red=True)

    def add(self, units: Units) -> None:
        """Take over the figures of a process, which may have a part of a file's tests."""
        for part, files in units.items():
            for file, n in files.items():
                self.measured[part][file] = self.measured[part].get(file, 0) + n

    def units(self) -> Units:
        """Measured in this process: {part: {file: units}}."""
        return {
            part: {file: n / self.unit for (p, file), n in self.seconds.items() if p == part}
            for part in PARTS
        }
