"""Without modules and functions that Unix alone has, everything is imported, and most of it works."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax import AsyncLLM
from mtp_jax import __main__ as program
from mtp_jax.checkpoint.safetensors_file import SafetensorsFile
from mtp_jax.commands.batch_file import _claimed
from mtp_jax.errors import RequestError
from mtp_jax.text import child, trial

ROOT = Path(__file__).parent.parent
HIDDEN = """
import os, socket, sys

for name in ("fcntl", "resource", "termios", "readline"):
    sys.modules[name] = None
for module, name in (
    *((os, name) for name in ("preadv", "pread", "getuid", "geteuid", "sched_getaffinity")),
    *((os, name) for name in ("memfd_create", "O_CLOEXEC")),
    *((socket, name) for name in ("send_fds", "recv_fds")),
):
    delattr(module, name)
"""
IMPORTS = """
import pkgutil
from importlib import import_module

import mtp_jax, serve

skipped = []
for package in (mtp_jax, serve):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            import_module(found.name)
        except ModuleNotFoundError as error:  # packages that are extras
            skipped.append(error.name)
assert not {"fcntl", "resource"} & {*skipped}, skipped
"""
COMMANDS = """
from mtp_jax.commands import cli

assert cli.main(["info"]) == 0
assert cli.main(["info", "--draft-model", "/nope"]) == 2
assert cli.main(["plan", "deepseek-v3", "--gpus", "8"]) == 0
open("in.jsonl", "w").close()
assert cli.main(["batch", "in.jsonl", "out.jsonl", "-q"]) == 2
"""


def test_everything_is_imported_and_a_checkpoint_is_described(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", HIDDEN + IMPORTS + COMMANDS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "NextN" in ran.stdout
    *_, last = ran.stderr.splitlines()
    assert last == "error: a batch locks its output file, which needs Linux or macOS"


def test_without_a_way_to_read_at_a_place_a_file_is_read_all_the_same(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    file = SafetensorsFile(tmp_path / "file")
    with_it = bytes(file.read(10, 80))
    monkeypatch.delattr(os, "preadv")
    assert bytes(file.read(10, 80)) == with_it == bytes(range(10, 90))
    assert bytes(file.read(0, 100)) == bytes(range(100))


def test_a_grammar_that_cannot_be_tried_is_refused(monkeypatch):
    monkeypatch.delattr(socket, "send_fds")
    trials = trial.Trials(None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="needs Linux or macOS"):
        trials.run("grammar")


def test_a_batch_that_cannot_lock_its_output_is_refused_before_it_makes_it(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(RequestError, match="needs Linux or macOS"), _claimed(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_a_system_without_limits_of_memory_is_told_of(monkeypatch, caplog):
    async def off_loop(start: Any) -> None:
        start()

    engine = SimpleNamespace(grammars=None)
    allm: Any = SimpleNamespace(
        llm=SimpleNamespace(engine=engine), about=SimpleNamespace(tokenizer=None), off_loop=off_loop
    )
    for hidden in (True, False):
        caplog.clear()
        monkeypatch.setattr(child, "held", lambda hidden=hidden: 0 if hidden else 1)
        asyncio.run(AsyncLLM.start_helpers(allm))
        assert [("has no /proc" in told) for told in caplog.messages] == [True] * hidden


def test_windows_is_refused_in_one_line(monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(program.os, "name", "nt")
    with pytest.raises(SystemExit) as stop:
        program.entry()
    assert stop.value.code == "error: mtp-jax runs on Linux; on Windows, run it inside WSL2"
    assert signal.getsignal(signal.SIGINT) is handler
