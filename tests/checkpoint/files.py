"""Safetensors files taken apart and put together again, without the code under test."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params, Spec, dtype_of, param_specs


@dataclass(frozen=True)
class Raw:
    """A tensor as bytes."""

    dtype: str
    shape: list[int]
    data: bytes

    def filled(self, value: int) -> "Raw":
        """The same with every byte set."""
        return replace(self, data=bytes([value]) * len(self.data))


Tensors = dict[str, Raw]


def read_raw(path: Path) -> Tensors:
    """The tensors of one file."""
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    return {
        name: Raw(e["dtype"], e["shape"], blob[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
        for name, e in header.items()
    }


def pack(header: Any, data: bytes) -> bytes:
    """A file's bytes; a header that is not bytes already is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_raw(path: Path, tensors: Tensors) -> None:
    """Write one file."""
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    path.write_bytes(pack(header, b"".join(t.data for t in tensors.values())))


def read_folder(folder: Path) -> Tensors:
    """The tensors of every file in a folder."""
    out: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= read_raw(file)
    return out


def copy_folder(source: Path, to: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(source, to)
    return to


def edit_tensors(source: Path, to: Path, change: Callable[[Tensors], Any]) -> Path:
    """A copy in one file, with its tensors changed in place."""
    tensors = read_folder(source)
    change(tensors)
    to.mkdir()
    write_raw(to / "model.safetensors", tensors)
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, to / name)
    return to


def drop_nextn(source: Path) -> Callable[[Tensors], None]:
    """A change for ``edit_tensors``: what is left when a model is saved without its NextN layers."""
    trunk = json.loads((source / "config.json").read_text())["num_hidden_layers"]

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"model.layers.{trunk}.")]:
            del tensors[name]

    return change


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def random_params(cfg: ModelConfig, rng: np.random.Generator, dtype: str = "float32") -> Params:
    """Random values in the dtypes of the parameters."""

    def draw(spec: Spec) -> jax.Array:
        return jnp.asarray(rng.normal(size=spec.shape).astype(dtype_of(spec, dtype)))

    return jax.tree.map(draw, param_specs(cfg))


def assert_same(a: Params, b: Params) -> None:
    """Equal trees, dtypes and values."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
