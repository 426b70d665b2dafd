"""Folders: shards, the index, links; what is wrong with them is said with names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_jax.checkpoint import load, summarise
from mtp_jax.checkpoint.folder import INDEX, open_folder
from mtp_jax.errors import CheckpointError, ConfigError
from tests.checkpoint.files import assert_same, copy_folder, read_raw, write_raw
from tests.golden import model_dir

FIRST, SECOND = "model-00001-of-000003.safetensors", "model-00002-of-000003.safetensors"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


def set_index(folder: Path, name: str, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def duplicate(folder: Path) -> None:
    second = read_raw(folder / SECOND)
    write_raw(folder / SECOND, second | {EMBED: read_raw(folder / FIRST)[EMBED]})


def remove_shards(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()


def only_bin(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shards": (remove_shards, ("shards", "are missing", FIRST, SECOND)),
    "duplicate": (
        duplicate,
        (f"{SECOND}: tensor {EMBED} is also in {FIRST}", f"expected it in one shard, {FIRST}"),
    ),
    "up": (
        lambda f: set_index(f, EMBED, f"../{FIRST}"),
        (INDEX, EMBED, f"'../{FIRST}'", "expected the name"),
    ),
    "absolute": (lambda f: set_index(f, EMBED, "/etc/x.safetensors"), (INDEX, EMBED, "'/etc/x.safetensors'")),
    "below": (lambda f: set_index(f, EMBED, "a/b.safetensors"), (INDEX, EMBED, "without directories")),
    "backslash": (lambda f: set_index(f, EMBED, "..\\b.safetensors"), (INDEX, EMBED, "without directories")),
    "another kind": (
        lambda f: set_index(f, EMBED, "model.bin"),
        (INDEX, EMBED, "'model.bin'", ".safetensors"),
    ),
    "not a name": (lambda f: set_index(f, EMBED, 3), (INDEX, EMBED, "3; expected the name")),
    "wrong shard": (lambda f: set_index(f, EMBED, SECOND), (f"tensor {EMBED} should be in {SECOND}", FIRST)),
    "no shard": (lambda f: set_index(f, "x", FIRST), (f"tensor x should be in {FIRST}; it is in no shard",)),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), (INDEX, "not readable JSON")),
    "index a list": (lambda f: (f / INDEX).write_text("[]"), (INDEX, "expected an object")),
    "index names a shard that no file system takes": (
        lambda f: set_index(f, EMBED, "x" * 300 + ".safetensors"),
        (INDEX, "of at most 255 bytes"),
    ),
    "index empty": (lambda f: (f / INDEX).write_text("{}"), (INDEX, "has no weight_map")),
    "index a folder": (lambda f: ((f / INDEX).unlink(), (f / INDEX).mkdir()), (INDEX, "not readable JSON")),
    "no index": (lambda f: (f / INDEX).unlink(), ("has 3 safetensors files", FIRST, f"no {INDEX}")),
    "only a pickle": (only_bin, ("has no safetensors file", "pytorch_model.bin", "can run code")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str):
    folder = copy_folder(model_dir("v3"), tmp_path / "model")
    damage, fragments = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for fragment in (str(folder), *fragments):
        assert fragment in str(caught.value)


def test_no_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load(tmp_path)


def test_links_to_files_elsewhere(tmp_path: Path):
    """The Hugging Face cache: a snapshot's files are links to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(model_dir("v3").iterdir()):
        (blobs / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    assert_same(load(snapshot).params, load(model_dir("v3")).params)


def test_files_the_index_does_not_name_are_not_opened(tmp_path: Path):
    folder = copy_folder(model_dir("v3"), tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"not one of ours")
    assert_same(load(folder).params, load(model_dir("v3")).params)


def test_tensors_the_index_does_not_name_are_found(tmp_path: Path):
    folder = copy_folder(model_dir("v3"), tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][NORM]
    (folder / INDEX).write_text(json.dumps(index))
    assert_same(load(folder).params, load(model_dir("v3")).params)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"], ids=["too long", "a zero byte"])
def test_a_name_that_no_folder_can_have(path: str):
    for use in (load, summarise):
        with pytest.raises(ConfigError, match=r"not readable JSON|is not a directory"):
            use(path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_folder(path)
