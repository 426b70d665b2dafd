"""Times of the kernels on GPUs, as they were measured; measured.toml holds them."""

import tomllib
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path

from kernels_pallas import FORMS

FILE = Path(__file__).with_name("measured.toml")


@dataclass(frozen=True)
class Run:
    """The times that one run found.

    Attributes:
        card: the GPU.
        date: day of the run.
        us: microseconds of a call, by case.
        traced: microseconds of the kernel alone in a profiler's trace, by case.
        steps: microseconds of all kernels of a decode step, by its name in `deviceless.step`.
    """

    card: str
    date: date
    us: dict[str, float]
    traced: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


@cache
def runs() -> tuple[Run, ...]:
    """All runs, the newest first."""
    with FILE.open("rb") as file:
        return tuple(Run(**run) for run in tomllib.load(file)["runs"])


def kernels() -> frozenset[str]:
    """Names of the kernels, and of the forms of kernels, of which a run has a time."""
    return frozenset(_timed(case) for run in runs() for case in (*run.us, *run.traced))


def _timed(case: str) -> str:
    """The form, or else the kernel, that a case has a time of."""
    return next((form for form in FORMS if case.startswith(f"{form}-")), case.partition("/")[0])


def newest(name: str) -> Run | None:
    """The newest run that has a case, or a step; None if there is none."""
    return next((run for run in runs() if name in run.us or name in run.steps), None)


def measured(case: str) -> str:
    """The newest time of a case and its card; a dash if none is known."""
    found = newest(case)
    return f"{found.us[case]:g} {found.card}" if found else "-"
