"""A module of the user's with the name of the server's package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mtp_jax

ROOT = Path(mtp_jax.__file__).parent.parent


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """In a folder, which `python -m` looks into first."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtp_jax", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


SERVE, HELP, BATCH = ["serve"], ["serve", "--port", "1", "--help"], ["batch", "in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (SERVE, "serve.py"),
        (BATCH, "serve/__init__.py"),
        *(
            pytest.param(*case, marks=pytest.mark.rest)
            for case in (
                *((SERVE, "serve/__init__.py"), (BATCH, "serve.py")),
                *((HELP, "serve.py"), (HELP, "serve/__init__.py")),
            )
        ),
    ],
)
def test_the_server_says_who_hides_it(tmp_path, name, argv):
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("print('executed')")
    done = run(tmp_path, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: `import serve` finds {own} instead of mtp-jax's own package, {ROOT}/serve;"
    )
    assert "rename that file" in line


def test_the_other_commands_do_not_mind(tmp_path):
    (tmp_path / "serve.py").write_text("raise SystemExit('executed')")
    done = run(tmp_path, "generate", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    listed = run(tmp_path, "--help").stdout
    assert "not here: hidden by" in listed


def test_a_folder_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "serve").mkdir()
    done = run(tmp_path, "serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--api-key" in done.stdout
