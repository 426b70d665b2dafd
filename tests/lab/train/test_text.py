"""Training text from wheels: exact versions, what is left out, copies of held-out files."""

import ast
import re
import zipfile
from pathlib import Path

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench.corpus import BOS, EOS, SourceFile
from mtp_jax.lab.bench.dialogues import dialogues
from mtp_jax.lab.train.packages import read_packages, without_copies
from mtp_jax.lab.train.recipe import Package, Recipe, Stage, TextSource
from mtp_jax.lab.train.text import read_text
from mtp_jax.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "configs" / "demo"


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


def recipe(folder: Path, *text: TextSource, packages: tuple[Package, ...] = ()) -> Recipe:
    return Recipe(
        model_config=folder / "c",
        tokenizer=folder / "t",
        stages=(Stage(1, 8, 1, text=text),),
        packages=packages,
    )


def test_a_recipe_and_its_folder_come_together(folder: Path) -> None:
    plain = recipe(folder, "library")
    named = recipe(folder, "library", "packages", packages=(Package("some-pkg==1.2", "MIT"),))
    text = read_text(named, folder, [SourceFile("lib.py", "y = 2\n")])
    assert [file.path for file in text.of(("library", "packages"))] == ["lib.py", "some-pkg/some_pkg/a.py"]
    with pytest.raises(ConfigError, match=r"needs the packages some-pkg==1\.2; download"):
        read_text(named)
    with pytest.raises(ConfigError, match="names no packages; leave out"):
        read_text(plain, folder)


def test_packages_are_listed_exactly_if_they_are_read(folder: Path) -> None:
    with pytest.raises(ValueError, match="lists none"):
        recipe(folder, "packages")
    with pytest.raises(ValueError, match="no stage reads"):
        recipe(folder, "library", packages=(Package("some-pkg==1.2", "MIT"),))


CODE = '''
class Path:
    def parts(self):
        """Return the parts of this path.

        An empty path has none.
        """
        return self._parts

    def helper(self):
        """See above."""
        return 1

    def abstract(self):
        """Say what a subclass has to compute."""


def reverse(items):
    """Reverses a list of items"""
    return items[::-1]


def no_docstring():
    return 0
'''


def test_functions_answer_what_their_docstrings_ask() -> None:
    found = dialogues([SourceFile("a.py", CODE), SourceFile("b.py", CODE), SourceFile("c.py", "def (")])
    assert [file.path for file in found] == ["a.py:18", "a.py:3"]
    for file, (word, code) in zip(
        found, [("list of items", "def reverse"), ("parts of this", "def parts")], strict=True
    ):
        user, question, answer = re.split("<\uff5c(?:User|Assistant)\uff5c>", file.text)
        assert not user
        assert word in question
        assert answer.startswith(f"```python\n{code}(")
        (function,) = ast.parse(answer.removeprefix("```python\n").removesuffix("```")).body
        assert isinstance(function, ast.FunctionDef)
        assert [type(line) for line in function.body] == [ast.Expr, ast.Return]


def test_dialogues_are_written_as_the_chat_template_writes_them() -> None:
    (document,) = dialogues([SourceFile("a.py", CODE[CODE.index("def reverse") :])])
    _, question, answer = re.split("<\uff5c(?:User|Assistant)\uff5c>", document.text)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    tokenizer = Tokenizer.from_dir(DEMO)
    assert tokenizer is not None
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert written == f"{BOS}{document.text}{EOS}"
