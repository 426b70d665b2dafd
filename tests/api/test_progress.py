"""Start-up lines: what a phase did and how long it took, signs of life, a bar on a terminal."""

import io
import re
import sys
import time

import pytest

from mtp_jax.api import progress
from mtp_jax.api.progress import Silent, Terminal


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """What the phases take for the time: seconds that a test lets pass."""
    passed = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: passed[0])
    return passed


def until(holds):
    while not holds():
        time.sleep(0.01)


def without_seconds(text):
    return [line.rpartition(": ")[0] for line in text.splitlines()]


def test_a_line_per_phase(capsys, clock):
    terminal = Terminal()
    with terminal.phase("read", "B") as update:
        update(10, 2_500_000)
        update(2_500_000, 2_500_000)
    with terminal.phase("place"):
        pass  # no time to speak of: no line
    with terminal.phase("allocate"):
        clock[0] += 0.6
    with terminal.phase("compile", "executable") as update:
        update(3, 3)
    with terminal.phase("compile", "executable"):
        pass  # everything was there: no line
    terminal.ready("a model")
    out, err = capsys.readouterr()
    assert out == ""
    *phases, ready = err.splitlines()
    assert without_seconds("\n".join(phases)) == ["read 2.5 MB", "allocate", "compile 3 executables"]
    assert all(line.endswith(" s") for line in phases)
    assert ready.startswith("ready in ")
    assert ready.endswith(" s: a model")


def test_signs_of_life_while_nothing_is_reported(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with Terminal().phase("compile", "executable") as update:
        until(lambda: "so far" in said.getvalue())
        update(1, 4)
        until(lambda: "1 of 4" in said.getvalue())
    err = said.getvalue()
    assert re.search(r"^compile: \d s so far$", err, re.MULTILINE)
    assert re.search(r"^compile: 1 of 4 executables, \d s so far, \S+/s, \d+ s left$", err, re.MULTILINE)
    assert all("so far" in line for line in err.splitlines()[:-1])  # no line holds two


@pytest.mark.parametrize(
    ("done", "total", "unit", "seconds", "says"),
    [
        (237, 1999, "request", 104.0, ", 2.3/s, 13 min left"),
        (1, 4, "executable", 10.0, ", 0.1/s, 30 s left"),
        (5_000_000, 50_000_000, "B", 2.0, ", 2.5 MB/s, 18 s left"),
        (1, 1000, "text", 36.0, ", 0.028/s, 10.0 h left"),
        (0, 4, "executable", 10.0, ""),
        (4, 4, "executable", 10.0, ""),
    ],
)
def test_rate_and_time_left(done, total, unit, seconds, says):
    assert progress._forecast(done, total, unit, seconds) == says


def test_no_line_for_a_phase_that_fails(capsys):
    with pytest.raises(ValueError, match="broken"), Terminal().phase("read", "B"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "_REDRAW_EVERY_SECONDS", 0.05)
    with Terminal().phase("read", "B") as update:
        update(500, 1000)
        until(lambda: "read:  50%" in screen.getvalue())
        update(1000, 1000)
    assert screen.getvalue().splitlines()[-1].startswith("read 1.0 kB: ")


def test_silent(capsys):
    with Silent().phase("read", "B") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")
