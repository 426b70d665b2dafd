"""Digests that are kept are as if all bytes had been read; they are read where something has changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_jax.checkpoint import kept_digest
from mtp_jax.checkpoint.digest import folder_digest
from mtp_jax.checkpoint.kept_digest import weights_digest
from tests.golden import model_dir

LATER = 10**6


class Model:
    """A folder of weights, and digests that are kept at a time at which all its files are old."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept, self.reads = folder / "model", folder / "kept", 0
        shutil.copytree(model_dir("rigged"), self.folder)
        self.kept.mkdir()
        self.weights = self.folder / "model.safetensors"

    def digest(self) -> str:
        found = weights_digest(self.folder, self.kept)
        assert found == folder_digest(self.folder, weights=True)
        return found

    def read(self, folder: Path, weights: bool) -> str:
        self.reads += 1
        return folder_digest(folder, weights)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    made, now = Model(tmp_path), kept_digest.time.time
    monkeypatch.setattr(kept_digest, "folder_digest", made.read)
    monkeypatch.setattr(kept_digest, "time", type("Clock", (), {"time": staticmethod(lambda: now() + LATER)}))
    return made


def test_files_that_have_not_changed_are_read_once(model: Model):
    first = model.digest()
    assert [model.digest(), model.digest()] == [first, first]
    assert model.reads == 1
    assert len([*model.kept.iterdir()]) == 1


def change_a_tensor(model: Model) -> None:
    """In place, with the size and the time of writing that it had."""
    info = model.weights.stat()
    with model.weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    os.utime(model.weights, ns=(info.st_atime_ns, info.st_mtime_ns))


def other_file(model: Model) -> None:
    """Renamed into its place, with the same size and times of writing."""
    copy = model.folder.with_name("copy")
    shutil.copy2(model.weights, copy)
    info = copy.stat()
    change_a_tensor(model)
    copy.write_bytes(model.weights.read_bytes())
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    copy.replace(model.weights)


def damaged_note(model: Model) -> None:
    (note,) = model.kept.iterdir()
    note.write_text("0" * 63)


def no_note(model: Model) -> None:
    shutil.rmtree(model.kept)


@pytest.mark.parametrize("change", [change_a_tensor, other_file, damaged_note, no_note])
def test_files_that_may_have_changed_are_read_again(model: Model, change: Callable[[Model], None]):
    model.digest()
    change(model)
    model.digest()
    assert model.reads == 2


def test_files_that_changed_just_now_are_not_trusted(model: Model, monkeypatch: pytest.MonkeyPatch):
    """A second change within a tick of the file system's clock might leave all times as they are."""
    ctime = model.weights.stat().st_ctime
    monkeypatch.setattr(kept_digest, "time", type("Clock", (), {"time": staticmethod(lambda: ctime + 1.9)}))
    model.digest()
    model.digest()
    assert (model.reads, [*model.kept.iterdir()]) == (2, [])


def test_files_that_change_while_they_are_read_are_not_trusted(model: Model, monkeypatch: pytest.MonkeyPatch):
    def read(folder: Path, weights: bool) -> str:
        found = model.read(folder, weights)
        change_a_tensor(model)
        return found

    monkeypatch.setattr(kept_digest, "folder_digest", read)
    weights_digest(model.folder, model.kept)
    assert not [*model.kept.iterdir()]


def test_nothing_is_kept_where_there_is_no_folder(model: Model):
    weights_digest(model.folder, None)
    weights_digest(model.folder, None)
    assert model.reads == 2
