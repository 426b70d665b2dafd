"""Promises of the repository as a whole: pinned versions, safe file formats, small files, finished text."""

import ast
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = {"", ".cfg", ".css", ".html", ".js", ".json", ".jinja", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
PROSE = {"", ".html", ".js", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
IMPORTED_TEST = r"(?:from|import) +tests\b[^\n(]*(?:\([^)]*?)?\btest_"
UNSAFE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# Machine code, which jax itself pickles, in a folder that is the user's alone (docs/programs.md); no weights.
PROGRAMS = "mtp_jax/decode/kept.py"
MAX_LINES = 450
MAX_LINES_OF_TESTS = 600


WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """Every file that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs git and a clone of the repository")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def parsed(files: list[Path], having: str) -> Iterator[tuple[Path, ast.AST]]:
    """The Python files with a word that an expression finds: to parse all of them takes seconds."""
    for path in (path for path in files if path.suffix == ".py"):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"\b({having})", text, re.MULTILINE):
            yield path, ast.parse(text)


def show(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_constraints_are_exact_versions():
    pin = re.compile(r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.\d+")?')
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wrong = [line for line in lines if not line.startswith("#") and not pin.fullmatch(line)]
    assert not wrong, "each line must be name==version, with a python_version marker at most"


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {re.split(r"[\[<>=~! ;]", item)[0].replace("_", "-").lower() for item in wanted}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names - pinned - {project["name"]} == set()


def test_type_checkers_read_the_annotations_of_every_package(files):
    """PEP 561: a wheel holds all files that git knows of its packages, but for excluded folders."""
    assert {"include", "only-include"}.isdisjoint(WHEEL)
    for package in WHEEL["packages"]:
        assert ROOT / package / "py.typed" in files


def test_no_format_that_runs_code_on_load(files):
    found = []
    for path, tree in parsed(files, "|".join([*UNSAFE, "allow_pickle"])):
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in UNSAFE for name in names):
                found.append(f"{show(path)} imports {names}")
            if (
                isinstance(node, ast.keyword)
                and node.arg == "allow_pickle"
                and ast.unparse(node.value) != "False"
            ):
                found.append(f"{show(path)}: allow_pickle on line {node.value.lineno}")
    assert found == [f"{PROGRAMS} imports ['pickle']"]


def test_files_are_short(files):
    lengths = {show(path): len(path.read_bytes().splitlines()) for path in files if path.suffix == ".py"}
    most = {name: MAX_LINES_OF_TESTS if name.startswith("tests/") else MAX_LINES for name in lengths}
    long = {name: length for name, length in lengths.items() if length > most[name]}
    assert not long, f"more than {MAX_LINES} lines, or {MAX_LINES_OF_TESTS} of tests: split by idea"


def test_tests_share_helpers_and_no_other_tests(files):
    found = []
    for path, tree in parsed(files, IMPORTED_TEST):
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            tests = [name for name in names if name.startswith("tests.") and ".test_" in name]
            found += [f"{show(path)} imports {name}" for name in tests]
    assert not found, "move what is shared to tests/<room>/helpers.py"


def test_a_clone_is_small(files):
    """The demo model's weights are more than half of it."""
    sizes = sorted(((path.stat().st_size, show(path)) for path in files), reverse=True)
    assert sizes[0][1] == "configs/demo/model.safetensors"
    assert sum(size for size, _ in sizes[1:]) < sizes[0][0], f"the largest: {sizes[:5]}"


def test_nothing_is_left_to_do(files):
    marks = re.compile(r"\b({})\b".format("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3])))
    found = [
        f"{show(path)}:{number}"
        for path in files
        if path.suffix in PROSE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_lines_end_with_lf(files):
    text = [path for path in files if path.suffix in TEXT]
    assert text
    assert not [show(path) for path in text if b"\r\n" in path.read_bytes()]
