"""What the documents say of the code, and of each other: files that a token passes, layers, tests, links."""

import argparse
import re
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mtp_jax
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.commands import cli
from tests import tiny_tokenizer
from tests.layers import FLOORS, LAYERS, ROOT
from tests.models import TINY, tiny_params
from tests.prose import pages

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
    cfg = replace(TINY, num_hidden_layers=1, vocab_size=112)
    save_checkpoint(tmp_path, cfg, tiny_params(cfg), "float32")
    model = tiny_tokenizer.write(tmp_path, cfg.vocab_size)
    sizes = "--max-model-len 96 --page-size 16 --prefill-chunk 16 --max-num-seqs 1 --num-speculative-tokens 1"
    prompt = ["--prompt", "abc", "--max-tokens", "8", "--no-compile-cache", "--ignore-eos"]
    assert cli.main(["generate", str(model), *prompt, *sizes.split()]) == 0
    assert capsys.readouterr().out
    ran = {str(Path(name).relative_to(PACKAGE)) for name in visited if name.startswith(f"{PACKAGE}/")}
    assert not [name for name in named if name not in ran]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_every_claim_names_a_test_that_is_there():
    rows = re.findall(r"^- .*: \[(test_\w+)\]\((.*\.py)\)$", section("README.md", "Claims"), re.M)
    assert len(rows) == section("README.md", "Claims").count("\n- ")
    for name, path in rows:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_picture_shows_the_speedups_of_the_table():
    measured = section("README.md", "Measured")
    bars = re.search(r"bar \[(.*)\]", measured)
    assert bars
    assert bars[1].split(", ") == re.findall(r"\| ([\d.]+) \([\d.-]+\) \|$", measured, re.M)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_links_lead_to_files_and_sections(path):
    """Between documents of the repository."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        to = path.parent / file if file else path
        assert to.exists(), link
        assert not anchor or anchor in anchors(to), link


def anchors(path: Path) -> list[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]


def test_every_document_is_listed():
    tables = {ROOT: section("README.md", "Documents")}
    tables[ROOT / "docs"] = tables[ROOT / "docs/notebooks"] = tables[ROOT]
    tables[ROOT / "docs/measured"] = (ROOT / "docs/measured/README.md").read_text(encoding="utf-8")
    assert not [p for p in pages() if p.name != "README.md" and f"{p.name})" not in tables[p.parent]]


def test_the_table_of_layers_is_that_of_the_tree():
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", section("docs/architecture.md", "Layers of the code"), re.M
    )
    named = [tuple(re.findall(r"`(\w+)`", row)) for row in rows]
    assert [set(row) for row in named] == [set(row) for row in reversed(LAYERS)]
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert {name for row in named for name in row} == parts


def test_the_table_of_folders_is_that_of_the_server():
    named = re.findall(r"^\| `(\w+)` \|", section("docs/architecture.md", "The server"), re.M)
    assert named == [*reversed(FLOORS["serve"])]


def test_the_table_of_folders_is_that_of_the_laboratory_and_the_cluster():
    layers = section("docs/architecture.md", "Layers of the code")
    for room in ("lab", "cluster"):
        named = re.findall(rf"^\| `{room}/(\w+)` \|", layers, re.M)
        assert named == [*reversed(FLOORS[f"mtp_jax.{room}"])]


@pytest.mark.parametrize("room", FLOORS)
def test_every_folder_has_a_place(room):
    folder = ROOT / room.replace(".", "/")
    assert {*FLOORS[room]} == {path.parent.name for path in folder.glob("*/__init__.py")}


def test_the_newest_release_of_the_changelog_is_the_version():
    """Releases are dated, newest first, in sections of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", text, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert releases[0][0] == project["version"]
    assert len(releases) == len(re.findall("^## ", text, re.M))
    assert releases == sorted(releases, reverse=True)
    assert {*re.findall("^### (.*)$", text, re.M)} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed"}


def test_the_page_of_commands_has_every_command_and_benchmark():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (commands,) = (a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    (benchmarks,) = (
        a for a in commands.choices["bench"]._actions if isinstance(a, argparse._SubParsersAction)
    )
    assert not [name for name in commands.choices if f"`mtp-jax {name}" not in text]
    assert not [name for name in benchmarks.choices if not re.search(rf"`{name}\b", text)]
