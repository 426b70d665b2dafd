"""What the README and docs/architecture.md say of the code: the files that a token passes, the layers."""

import re
import shutil
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mtp_jax
from mtp_jax.commands import cli
from tests import golden, tiny_tokenizer
from tests.test_imports import LAYERS, ROOT

PACKAGE = Path(mtp_jax.__file__).parent
FILE = re.compile(r"`([a-z_/]+\.py)`")


def section(path: str, heading: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{path} has no section {heading!r}"
    return found[1]


@pytest.fixture
def visited():
    """Files of the package in the order in which their functions are first called, on any thread."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.setdefault(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    yield files
    sys.setprofile(None)
    threading.setprofile(None)


def test_a_token_goes_through_the_files_that_the_readme_names(visited, tmp_path, capsys):
    """Each named file runs while one prompt is completed."""
    named = FILE.findall(section("README.md", "A token, from prompt to output"))
    assert len(set(named)) > 15
    assert not [name for name in named if not (PACKAGE / name).is_file()]
    shutil.copytree(golden.model_dir("rigged"), tmp_path / "model")
    model = tiny_tokenizer.write(tmp_path / "model", golden.raw_config("rigged")["vocab_size"])
    sizes = "--max-model-len 96 --page-size 16 --prefill-chunk 16 --max-num-seqs 1 --num-speculative-tokens 1"
    prompt = ["--prompt", "abc", "--max-tokens", "8", "--no-compile-cache", "--ignore-eos"]
    assert cli.main(["generate", str(model), *prompt, *sizes.split()]) == 0
    assert capsys.readouterr().out
    ran = {str(Path(name).relative_to(PACKAGE)) for name in visited if name.startswith(f"{PACKAGE}/")}
    assert not [name for name in named if name not in ran]


def test_the_table_of_layers_is_that_of_the_tree():
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", section("docs/architecture.md", "Layers of the code"), re.M
    )
    named = [tuple(re.findall(r"`(\w+)`", row)) for row in rows]
    assert [set(row) for row in named] == [set(row) for row in reversed(LAYERS)]
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert {name for row in named for name in row} == parts
