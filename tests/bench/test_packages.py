"""Training text from wheels: exact versions, what is left out, copies of held-out files."""

import zipfile
from pathlib import Path

import pytest

from mtp_jax.bench.corpus import SourceFile
from mtp_jax.bench.packages import read_packages, without_copies
from mtp_jax.errors import ConfigError
from mtp_jax.train.loop import default_files
from mtp_jax.train.recipe import Package, Recipe, Stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "some_pkg-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_pkg/a.py", "x = 1\r\n")
        wheel.writestr("some_pkg/b.py", "x = 1\n")
        wheel.writestr("some_pkg/tests/c.py", "y = 1\n")
        wheel.writestr("some_pkg/latin.py", b"# \xe9\n")
        wheel.writestr("some_pkg/data.txt", "z")
    return tmp_path


def test_each_content_once_without_tests_and_other_encodings(folder: Path) -> None:
    assert read_packages(["Some.Pkg==1.2"], folder) == [SourceFile("some-pkg/some_pkg/a.py", "x = 1\n")]


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("some-pkg==1.3", "has version 1.2; run `pip download"),
        ("other==1", "has no wheel of it"),
        ("some-pkg", "no exact version"),
        ("some-pkg==1.*", "no exact version"),
        ("==", "cannot be read"),
    ],
)
def test_a_wrong_package_is_refused(folder: Path, pin: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_packages([pin], folder)


def test_a_damaged_wheel_is_refused(folder: Path) -> None:
    (folder / "bad-1-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="damaged"):
        read_packages(["bad==1"], folder)


def test_near_copies_of_held_out_files_are_dropped() -> None:
    lines = [f"a_long_enough_statement_{i} = {i}\n" for i in range(10)]
    held = SourceFile("held.py", "".join(lines))
    copy = SourceFile("vendor.py", "".join([*lines[:8], "something_else_entirely = 1\n"]))
    other = SourceFile("other.py", "".join([lines[0], *(f"quite_a_different_line_{i}\n" for i in range(9))]))
    assert without_copies([copy, other], [held]) == [other]


def test_a_recipe_and_its_folder_come_together(folder: Path) -> None:
    plain = Recipe(folder / "c", folder / "t", (Stage(1, 8, 1),))
    named = Recipe(folder / "c", folder / "t", (Stage(1, 8, 1),), packages=(Package("some-pkg==1.2", "MIT"),))
    assert default_files(named, folder)[-1].path == "some-pkg/some_pkg/a.py"
    with pytest.raises(ConfigError, match=r"needs the packages some-pkg==1\.2; download"):
        default_files(named, None)
    with pytest.raises(ConfigError, match="names no packages; leave out"):
        default_files(plain, folder)
