"""Ctrl-C while a command starts: it ends at once, and says nothing."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mtp_jax
from mtp_jax.commands import cli
from tests import golden

V3 = str(golden.model_dir("v3"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(mtp_jax.__file__).parent.parent)}
KILLED = -signal.SIGINT  # 130 in a shell
# Presses Ctrl-C when a module is looked for, in the way that the first argument says.
PRESSES = """
import gc, signal, sys, time
from mtp_jax.__main__ import entry

signal.signal(signal.SIGINT, signal.default_int_handler)
how, module = sys.argv.pop(1), sys.argv.pop(1)


def press(*_):
    if press in gc.callbacks:
        gc.callbacks.remove(press)
    signal.raise_signal(signal.SIGINT)


def handled(*_):
    print("handled")


class Finder:
    def find_spec(self, name, *rest):
        if name != module:
            return
        if how == "in a collection":
            gc.callbacks.append(press)
            gc.collect()
        elif how == "in a callback of C":
            sorted([2, 1], key=lambda _: press())
        elif how in ("plainly", "with a handler"):
            press()


if how == "with a handler":
    signal.signal(signal.SIGINT, handled)
if how == "afterwards":
    from mtp_jax.lab.commands import info

    info.run = lambda args: (__import__(module), press())
if how == "in a later collection":
    from mtp_jax.lab.commands import info

    info.run = lambda args: (__import__(module), gc.callbacks.append(press), gc.collect(), time.sleep(60))
sys.meta_path.insert(0, Finder())
entry()
"""


@pytest.mark.parametrize(
    ("how", "module", "argv", "status"),
    [
        ("plainly", "mtp_jax.commands.cli", ["version"], KILLED),
        pytest.param("plainly", "mtp_jax.commands.batch", ["version"], KILLED, marks=pytest.mark.rest),
        ("plainly", "jax", ["info", V3], KILLED),
        ("in a collection", "jax", ["info", V3], KILLED),
        ("in a callback of C", "jax._src.core", ["info", V3], KILLED),
        ("with a handler", "jax", ["info", V3], 0),
        pytest.param("afterwards", "jax", ["info", V3], cli.INTERRUPTED, marks=pytest.mark.rest),
        ("in a later collection", "jax", ["info", V3], cli.INTERRUPTED),
        pytest.param("never", "jax", ["info", V3], 0, marks=pytest.mark.rest),
    ],
)
def test_ctrl_c_during_an_import_ends_the_process(how, module, argv, status):
    """Also where an exception would be lost; a handler that was there before is left alone."""
    command = [sys.executable, "-c", PRESSES, how, module, *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (status, "")
    assert ("handled" in done.stdout) == (how == "with a handler")


# Waits for the end of its input once the command is done, so that a Ctrl-C that was lost shows.
# The test may itself run where Ctrl-C is ignored, as in the background.
WAITS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mtp_jax.__main__ import entry

try:
    entry()
except SystemExit as ended:
    if ended.code:
        raise
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.stdin.read()
"""


COMMAND = [sys.executable, "-c", WAITS, "info", V3]


@functools.cache
def whole() -> float:
    """Seconds that the whole command takes."""
    began = time.monotonic()
    subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, check=True)
    return time.monotonic() - began


@pytest.mark.rest
@pytest.mark.parametrize(
    "share", [0.4, 0.8, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.6))]
)
def test_ctrl_c_at_any_time_of_the_start(share):
    """As a share of what the whole command takes, nearly all of which is the import of jax."""
    seconds, pipe = share * whole(), subprocess.PIPE
    with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) in (KILLED, cli.INTERRUPTED)
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == b""
