"""The budget of CPU time names every test file, and fails a run that is over it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import cpu_time
from tests.cpu_time import FILE, FREE, NOISE, ROOM, CpuTime, lowered, read_budget, text, too_much
from tests.layers import ROOT


@pytest.fixture
def budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "budget.toml"
    path.write_text(text({"test": {"tests/test_a.py": 10.0}, "rest": {}}))
    monkeypatch.setattr(cpu_time, "BUDGET", path)
    return path


def test_every_file_has_a_budget():
    """But for files whose tests are slow, want a GPU or want a package that may be missing."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    listed = {file for part in read_budget().values() for file in part}
    assert not listed - {*files}, "files that are gone"
    beside = ("mark.slow", "mark.gpu", "importorskip", "browser_only")
    missing = [f for f in {*files} - listed if not any(mark in files[f].read_text() for mark in beside)]
    assert not missing, (
        "measure each alone: python -m pytest FILE --lower-cpu-budget -o cache_dir=$(mktemp -d)"
    )


def test_a_file_ends_soon():
    assert {file: units for file, units in read_budget()["test"].items() if units > FILE} == {}


def test_a_room_is_over_its_budget_by_more_than_noise():
    """Its files share programs, so that no sum of budgets says how long it takes."""
    had, most = {"test": {}, "rest": {}}, NOISE * ROOM + FREE
    spent = {"tests/x/test_a.py": most - 9, "tests/x/test_b.py": 9.0, "tests/test_c.py": 999.0}
    assert not too_much(had, {"test": spent, "rest": {}})
    (fault,) = too_much(had, {"test": {**spent, "tests/x/test_b.py": 10.0}, "rest": {}})
    assert fault.startswith(f"tests/x took {most + 1:.1f} units")


def test_a_budget_only_falls():
    had = {"test": {"a": 2.0, "b": 3.0}, "rest": {}}
    assert lowered(had, {"test": {"a": 1.0, "b": 4.0, "c": 5.0}, "rest": {"a": 9.0}}) == {
        "test": {"a": 1.0, "b": 3.0, "c": 5.0},
        "rest": {"a": 9.0},
    }


def test_a_file_is_over_its_budget_by_more_than_noise():
    most, file = NOISE * 10 + FREE, "tests/test_a.py"
    had = {"test": {file: 10.0}, "rest": {}}
    assert not too_much(had, {"test": {file: most, "tests/test_new.py": 999.0}, "rest": {file: 999.0}})
    (fault,) = too_much(had, {"test": {file: most + 1}, "rest": {}})
    assert (
        fault
        == f"{file} took {most + 1:.1f} units of CPU time in `test`; its budget is 10.0 (tests/cpu_time.py)"
    )


@pytest.mark.parametrize(
    ("units", "ended"), [(29.0, pytest.ExitCode.OK), (31.0, pytest.ExitCode.TESTS_FAILED)]
)
def test_a_run_over_the_budget_fails(budget, units, ended):
    """A file's tests may be split among workers, whose figures are added."""
    own = CpuTime(cast(Any, SimpleNamespace(getoption=lambda name: False)))
    for part in (units - 5, 5.0):
        own.pytest_testnodedown(SimpleNamespace(workeroutput={"units": {"test": {"tests/test_a.py": part}}}))
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    own.pytest_sessionfinish(session)
    assert session.exitstatus == ended


def test_the_budget_is_written_on_demand(budget):
    own = CpuTime(cast(Any, SimpleNamespace(getoption=lambda name: name == "lower_cpu_budget")))
    own.add({"test": {"tests/test_a.py": 4.0, "tests/test_b.py": 1.25}, "rest": {}})
    own.pytest_sessionfinish(cast(Any, SimpleNamespace(exitstatus=pytest.ExitCode.OK)))
    assert read_budget() == {"test": {"tests/test_a.py": 4.0, "tests/test_b.py": 1.2}, "rest": {}}


def test_a_unit_takes_time():
    assert 0.01 < cpu_time.calibrate() < 60
