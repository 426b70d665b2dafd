"""Times of the kernels on GPUs, as they were measured; measured.toml holds them."""

import tomllib
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("measured.toml")


@dataclass(frozen=True)
class Run:
    """The times that one run found.

    Attributes:
        card: the GPU.
        date: day of the run.
        us: microseconds of a call, by case.
    """

    card: str
    date: date
    us: dict[str, float]


@cache
def runs() -> tuple[Run, ...]:
    """All runs, the newest first."""
    with FILE.open("rb") as file:
        return tuple(Run(**run) for run in tomllib.load(file)["runs"])


def measured(case: str) -> str:
    """The newest time of a case and its card; a dash if none is known."""
    found = next((run for run in runs() if case in run.us), None)
    return f"{found.us[case]:g} {found.card}" if found else "-"
