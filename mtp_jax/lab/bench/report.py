"""Output of every measurement: a Markdown table and a JSON file with the command and the machine."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtp_jax.decode.law import MARK
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.machine import usable_cores


@dataclass(frozen=True)
class Report:
    """One measurement: a table for people, figures for programs.

    Attributes:
        title: the measurement and the model.
        headers: column titles of the table.
        rows: rows of the table.
        notes: lines below the table.
        figures: all measurements, ready for JSON.
        pending: number of levels not measured yet; the report grows with each level.
        faults: failures that the measurement found, for which the command fails.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    figures: JsonMapping = field(default_factory=dict)
    pending: int = 0
    faults: Sequence[str] = ()

    def text(self) -> str:
        """The title, the table in Markdown, the notes, the faults."""
        below = (f"\n{n}" for n in (*self.notes, *self.faults))
        return "\n".join([f"{self.title}\n", table(self.headers, self.rows), *below])


def forced(report: Report, law: str) -> Report:
    """A report that says that its acceptance was forced, wherever it ends up. law: in words."""
    note = f"{law}, whatever the model said. These figures say what steps cost; the text is garbage."
    return marked(report, note, {"synthetic_acceptance": law})


def marked(report: Report, note: str, figures: JsonObject, mark: str = MARK) -> Report:
    """A report whose title begins with a mark, with a further note and figures."""
    title = report.title if report.title.startswith(mark) else f"{mark} - {report.title}"
    return replace(report, title=title, notes=[note, *report.notes], figures={**figures, **report.figures})


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: text to the left, numbers to the right."""
    columns = [[str(row[i]) for row in (headers, *rows)] for i in range(len(headers))]
    padded, rule = [], []
    for column in columns:
        width, number = max(map(len, column)), all(c[:1].isdigit() or c[:1] == "-" for c in column[1:])
        padded.append([c.rjust(width) if number else c.ljust(width) for c in column])
        rule.append("-" * (width + 1) + ":" if number else ":" + "-" * (width + 1))
    lines = ["| " + " | ".join(column[i] for column in padded) + " |" for i in range(1 + len(rows))]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def environment() -> JsonObject:
    """The date, versions, processor, cores, and how busy the machine was at the start."""
    packages = ("mtp-jax", "jax", "jaxlib", "numpy")
    return {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: _version(name) for name in packages},
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check(path: Path) -> None:
    """Check that a file can be written, before the measurement. Raises ConfigError or OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written; name another file")


def write(report: Report, path: str | Path, made_by: JsonMapping) -> None:
    """Write ``report`` as JSON; ``made_by``: the command, its options and ``environment()``."""
    path = Path(path)
    pending = {"pending_levels": report.pending} if report.pending else {}
    content = {"title": report.title, **made_by, **pending, "figures": report.figures}
    path.write_text(json.dumps(content, indent=2, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return np.asarray(value).tolist()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
