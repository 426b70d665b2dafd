"""Digests of checkpoint folders: any bit of any tensor changes them; the place of tensors does not."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.checkpoint.digest import DigestPart, digest, folder_digest, folder_sizes, tensors_of
from mtp_jax.checkpoint.folder import as_folder, open_folder
from mtp_jax.checkpoint.safetensors_file import hold
from mtp_jax.errors import CheckpointError
from tests.checkpoint.files import Tensors, read_folder, write_raw
from tests.golden import model_dir

# Scales, NextN layers, routers, norms; a head with tables of ids; FP4 and ue8m0.
FOLDERS = {"fp8": model_dir("fp8"), "head": model_dir("eagle3", "draft"), "v4": model_dir("v4_fp4")}


def in_one_file(folder: Path, tensors: Tensors) -> str:
    write_raw(folder / "model.safetensors", tensors)
    return folder_digest(folder, weights=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_one_bit_of_any_tensor_gives_another_digest(name, tmp_path, rng):
    """The bit is anywhere: in the first byte, the last, or between."""
    tensors = read_folder(FOLDERS[name])
    found = {in_one_file(tmp_path, tensors)}
    path = tmp_path / "model.safetensors"
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    parts = json.loads(path.read_bytes()[8:start])
    for part in parts.values():
        first, end = part["data_offsets"]
        at = start + int(rng.choice([first, end - 1, rng.integers(first, end)]))
        with path.open("r+b") as file:
            file.seek(at)
            was = file.read(1)[0]
            file.seek(at)
            file.write(bytes([was ^ 1 << int(rng.integers(8))]))
            file.flush()
            found.add(folder_digest(tmp_path, weights=True))
            file.seek(at)
            file.write(bytes([was]))
    assert len(found) == 1 + len(tensors)


def test_names_dtypes_and_shapes_count(tmp_path):
    tensors = read_folder(FOLDERS["head"])
    name, held = next((n, t) for n, t in tensors.items() if len(t.shape) == 2)
    rest = {n: t for n, t in tensors.items() if n != name}
    found = [
        in_one_file(tmp_path, changed)
        for changed in (
            tensors,
            rest,
            rest | {f"{name}2": held},
            tensors | {name: replace(held, dtype="I32" if held.dtype == "F32" else "F16")},
            tensors | {name: replace(held, shape=held.shape[::-1])},
        )
    ]
    assert len({*found}) == len(found)


def test_other_shards_are_the_same_tensors(tmp_path):
    """A folder in shards, one file in another order, and arrays in memory."""
    tensors = read_folder(FOLDERS["fp8"])
    want = folder_digest(FOLDERS["fp8"], weights=True)
    assert in_one_file(tmp_path, dict(reversed(tensors.items()))) == want
    arrays = {name: hold(name, t.array()) for name, t in open_folder(FOLDERS["fp8"]).tensors.items()}
    assert digest(tensors_of(as_folder(Path("arrays"), arrays))) == want


def test_a_folder_is_known_by_all_its_files(tmp_path):
    tensors = read_folder(FOLDERS["head"])
    weights = in_one_file(tmp_path, tensors)
    (tmp_path / "config.json").write_text("{}")
    before, sizes = folder_digest(tmp_path), folder_sizes(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("of this host alone")
    assert (folder_digest(tmp_path), folder_sizes(tmp_path)) == (before, sizes)
    (tmp_path / "config.json").write_text("[]")
    assert folder_digest(tmp_path) != before
    assert folder_sizes(tmp_path) == sizes
    (tmp_path / "README.md").write_text("x")
    assert folder_sizes(tmp_path) != sizes
    assert folder_digest(tmp_path, weights=True) == weights


def test_files_of_another_kind_count_from_beginning_to_end(tmp_path):
    """Orbax has no safetensors."""
    path, size, found = tmp_path / "params" / "d" / "0", 3 << 20, set()
    path.parent.mkdir(parents=True)
    for at in (None, 0, size // 2 + 1, size - 1):
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        path.write_bytes(data)
        found.add(folder_digest(tmp_path, weights=True))
    assert len(found) == 4


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model.safetensors .* damaged"):
        folder_digest(tmp_path)


def test_a_part_that_cannot_be_read_is_an_error():
    def broken() -> Iterator[np.ndarray]:
        raise OSError("I/O error")

    whole = DigestPart("a", lambda: iter([np.zeros(1, np.uint8)]))
    with pytest.raises(OSError, match="I/O"):
        digest([whole, DigestPart("b", broken)])
