"""Damaged files: every kind is found before a tensor is read, and the message says what and where."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

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
    "empty": (b"", "is truncated: 0 bytes"),
    "five bytes": (GOOD[:5], "is truncated: 5 bytes"),
    "inside the header": (GOOD[:40], "header length"),
    "inside a tensor": (
        GOOD[:-3],
        "tensor b ends at byte",
        f"the file has {len(GOOD) - 3} bytes",
        "truncated",
    ),
    "no tensor bytes": (GOOD[:-32], "tensor a ends at byte", "truncated"),
    "length zero": (bytes(8) + GOOD[8:], "header length 0; expected 2 to"),
    "length huge": (b"\xff" * 8 + GOOD[8:], "header length 18446744073709551615; expected 2 to"),
    "not JSON": (pack(b'{"a": ', DATA), "the header is not valid JSON"),
    "not text": (pack(b"\xff\xfe{}", DATA), "the header is not valid JSON"),
    "nested too deep": (pack(b"[" * 100_000, DATA), "the header is not valid JSON"),
    "a list": (pack([], b""), "the header is a JSON list; expected an object"),
    "twice": (pack(b'{"a": 1, "a": 2}', DATA), "lists 'a' twice; expected each name once"),
    "entry of another type": (pack({"a": A, "b": 3}, DATA), "tensor b has header entry 3; expected dtype"),
    "entry without offsets": (pack({"b": {"dtype": "F32", "shape": []}}, DATA), "tensor b has header entry"),
    "unknown dtype": (with_b(dtype="F4"), "tensor b has dtype 'F4'; expected one of F64, F32"),
    "dtype of another type": (with_b(dtype=["F32"]), "tensor b has dtype ['F32']"),
    "negative shape": (with_b(shape=[-4]), "tensor b has shape [-4]; expected a list of numbers >= 0"),
    "fractional shape": (with_b(shape=[4.0]), "tensor b has shape [4.0]"),
    "true as a shape": (with_b(shape=[True]), "tensor b has shape [True]"),
    "one offset": (with_b(data_offsets=[24]), "tensor b has data_offsets [24]; expected [begin, end]"),
    "negative offset": (with_b(data_offsets=[-8, 0]), "tensor b has data_offsets [-8, 0]"),
    "offsets reversed": (
        with_b(data_offsets=[32, 24]),
        "tensor b",
        "-8 bytes; expected 8 bytes for BF16 [4]",
    ),
    "shape does not fit": (with_b(shape=[5]), "tensor b", "8 bytes; expected 10 bytes for BF16 [5]"),
    "shape overflows": (
        with_b(shape=[2**40] * 4),
        "tensor b",
        "expected 2923003274661805836407369665432566039311",
    ),
    "overlap": (with_b(data_offsets=[20, 28]), "tensor b starts at byte", "overlaps a; expected byte"),
    "gap": (
        pack({"a": A, "b": B | {"data_offsets": [26, 34]}}, DATA + b"xx"),
        "tensor b",
        "leaves a gap after a",
    ),
    "gap at the start": (
        pack({"b": B | {"data_offsets": [2, 10]}}, DATA[:10]),
        "leaves a gap after the header",
    ),
    "bytes at the end": (GOOD + b"xx", "has 2 bytes after its last tensor; expected", f"got {len(GOOD) + 2}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str):
    blob, *fragments = DAMAGE[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(blob)
    with pytest.raises(CheckpointError) as caught:
        open_file(path)
    for fragment in (str(path), *fragments):
        assert fragment in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_good_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensors = open_file(path)
    assert list(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["a"].array(), np.frombuffer(DATA[:24], "<f4").reshape(2, 3))
    assert bytes(tensors["b"].bytes()) == DATA[24:]
    assert not tensors["a"].array().flags.writeable


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


def test_file_that_shrinks_after_the_check(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    tensor = open_file(path)["b"]
    path.write_bytes(GOOD[:-1])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        tensor.array()


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
