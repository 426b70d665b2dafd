"""Damaged files: every kind is found before a tensor is read, and the message says where."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mtp_jax.checkpoint import safetensors_file
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.errors import CheckpointError
from tests.checkpoint.files import pack

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = bytes(range(32))
GOOD = pack({"__metadata__": {"format": "pt"}, "a": A, "b": B}, DATA)


def with_b(**changes: Any) -> bytes:
    return pack({"a": A, "b": B | changes}, DATA)


DAMAGE = {
    "empty": b"",
    "five bytes": GOOD[:5],
    "inside the header": GOOD[:40],
    "inside a tensor": GOOD[:-3],
    "no tensor bytes": GOOD[:-32],
    "length zero": bytes(8) + GOOD[8:],
    "length huge": b"\xff" * 8 + GOOD[8:],
    "not JSON": pack(b'{"a": ', DATA),
    "not text": pack(b"\xff\xfe{}", DATA),
    "nested too deep": pack(b"[" * 100_000, DATA),
    "a list": pack([], b""),
    "a name of two": pack(f'{{"a": {json.dumps(A)}, "a": {json.dumps(B)}}}'.encode(), DATA),
    "entry of another type": pack({"a": A, "b": 3}, DATA),
    "entry without offsets": pack({"b": {"dtype": "F32", "shape": []}}, DATA),
    "dtype of another type": with_b(dtype=["F32"]),
    "negative shape": with_b(shape=[-4]),
    "fractional shape": with_b(shape=[4.0]),
    "true as a shape": with_b(shape=[True]),
    "one offset": with_b(data_offsets=[24]),
    "negative offset": with_b(data_offsets=[-8, 0]),
    "offsets reversed": with_b(data_offsets=[32, 24]),
    "shape does not fit": with_b(shape=[5]),
    "shape overflows": with_b(shape=[2**40] * 4),
    "overlap": with_b(data_offsets=[20, 28]),
    "gap": pack({"a": A, "b": B | {"data_offsets": [26, 34]}}, DATA + b"xx"),
    "gap at the start": pack({"b": B | {"data_offsets": [2, 10]}}, DATA[:10]),
    "bytes at the end": GOOD + b"xx",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGE[kind])
    with pytest.raises(CheckpointError, match="truncated, damaged or no safetensors file") as caught:
        open_file(path)
    assert str(caught.value).startswith(f"{path} ({len(DAMAGE[kind])} bytes)")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("dtype", ["C64", "F8_E5M2FNUZ"])
def test_a_dtype_that_numpy_does_not_know_is_named(tmp_path: Path, dtype: str):
    entry = {"dtype": dtype, "shape": [8 if dtype.startswith("F8") else 1], "data_offsets": [0, 8]}
    (tmp_path / "x.safetensors").write_bytes(pack({"a": entry}, DATA[:8]))
    with pytest.raises(CheckpointError, match=f"tensor a has dtype '{dtype}'; expected one of F64, F32"):
        open_file(tmp_path / "x.safetensors")


def test_good_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensors = open_file(path)
    assert list(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["a"].array(), np.frombuffer(DATA[:24], "<f4").reshape(2, 3))
    assert tensors["b"].array().tobytes() == DATA[24:]
    assert not tensors["a"].array().flags.writeable
    np.testing.assert_array_equal(tensors["a"].array(range(1, 2)), tensors["a"].array()[1:])
    assert tensors["a"].array(range(2, 2)).shape == (0, 3)


def test_agrees_with_the_reference_library(tmp_path: Path):
    arrays = {
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bytes": np.arange(5, dtype=np.uint8),
        "halves": np.arange(6, dtype=np.float16).reshape(2, 3),
        "ints": np.arange(3, dtype=np.int64),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    tensors = open_file(tmp_path / "x.safetensors")
    assert tensors.keys() == arrays.keys()
    for name, want in arrays.items():
        np.testing.assert_array_equal(tensors[name].array(), want)


def _truncated(path: Path) -> None:
    path.write_bytes(GOOD[:-1])


def _emptied(path: Path) -> None:
    path.open("wb").close()


def _written_anew(path: Path) -> None:
    path.write_bytes(GOOD)
    os.utime(path, ns=(0, 0))  # a time that it never had, however coarse the clock of files is


CHANGES = [_truncated, _emptied, _written_anew]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, change: Callable[[Path], None]):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensor = open_file(path)["b"]
    assert tensor.array().tobytes() == DATA[24:]
    change(path)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.array()


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_in_the_midst_of_a_read(tmp_path: Path, monkeypatch, change):
    """The system gives some bytes, then somebody writes; mapped, the rest would end the process by SIGBUS."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensor, read, reads = open_file(path)["a"], os.preadv, []

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == 2:
            change(path)
        return read(fd, [buffers[0][:10]], offset)

    monkeypatch.setattr(os, "preadv", some)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.array()
    assert len(reads) > 1


def test_a_header_that_is_truncated_while_it_is_checked(tmp_path: Path, monkeypatch):
    """The library maps what it checks: that is not the file that others write to."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    checked = safetensors_file.safe_open

    def truncated_first(*args: str) -> object:
        _emptied(path)
        return checked(*args)

    monkeypatch.setattr(safetensors_file, "safe_open", truncated_first)
    tensors = open_file(path)
    assert list(tensors) == ["a", "b"]
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensors["a"].array()


def test_another_file_of_the_same_name_changes_nothing(tmp_path: Path):
    """What ``os.replace`` puts there is another file: the opened one is read to its end."""
    path, new = tmp_path / "x.safetensors", tmp_path / "new"
    path.write_bytes(GOOD)
    tensor = open_file(path)["b"]
    new.write_bytes(GOOD[:-1])
    os.replace(new, path)
    assert tensor.array().tobytes() == DATA[24:]


def test_a_file_is_closed_when_nothing_refers_to_it(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensors = open_file(path)
    fd = tensors["a"].file._fd  # pyright: ignore
    os.fstat(fd)
    del tensors
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_directory_or_nothing_in_its_place(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_file(path)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 33), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_to_the_header_is_an_error_of_ours(tmp_path_factory: Any, changes: list[tuple[int, int]]):
    blob = bytearray(GOOD)
    for at, value in changes:
        blob[at] = value
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(blob)
    try:
        tensors = open_file(path)
    except CheckpointError:
        return
    assert sum(t.nbytes for t in tensors.values()) == 32
    for t in tensors.values():
        assert t.array().shape == t.shape


@pytest.mark.rest
@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_header_entry_is_an_error_of_ours(tmp_path_factory: Any, entry: Any):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(pack(json.dumps({"a": entry}).encode(), DATA))
    with pytest.raises(CheckpointError):
        open_file(path)
