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


def without_seconds(text):
    return [line.rpartition(": ")[0] for line in text.splitlines()]


def test_a_line_per_phase(capsys):
    terminal = Terminal()
    with terminal.phase("read", "B") as update:
        update(10, 2_500_000)
        update(2_500_000, 2_500_000)
    with terminal.phase("place"):
        pass  # no time to speak of: no line
    with terminal.phase("allocate"):
        time.sleep(0.6)
    with terminal.phase("compile", "executables") as update:
        update(3, 3)
    with terminal.phase("compile", "executables"):
        pass  # everything was there: no line
    terminal.ready("a model")
    out, err = capsys.readouterr()
    assert out == ""
    *phases, ready = err.splitlines()
    assert without_seconds("\n".join(phases)) == ["read 2.5 MB", "allocate", "compile 3 executables"]
    assert all(line.endswith(" s") for line in phases)
    assert ready.startswith("ready in ")
    assert ready.endswith(" s: a model")


def test_signs_of_life_while_nothing_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0.05)
    with Terminal().phase("compile", "executables") as update:
        time.sleep(0.2)
        update(1, 4)
        time.sleep(0.2)
    err = capsys.readouterr().err
    assert re.search(r"^compile: \d s so far$", err, re.MULTILINE)
    assert re.search(r"^compile: 1 of 4 executables, \d s so far$", err, re.MULTILINE)


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
        time.sleep(0.2)
        update(1000, 1000)
    assert "read:  50%" in screen.getvalue()
    assert screen.getvalue().splitlines()[-1].startswith("read 1.0 kB: ")


def test_silent(capsys):
    with Silent().phase("read", "B") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")
