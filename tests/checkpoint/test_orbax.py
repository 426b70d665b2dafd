"""Orbax folders: saved from any sharding, restored to any other."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from mtp_jax.checkpoint import convert, is_orbax, load, orbax_store, restore, save, summarise
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model.params import param_specs
from mtp_jax.model.sharding import make_mesh, partition
from tests.checkpoint.files import assert_same, drop_nextn, edit_json, edit_tensors
from tests.golden import model_dir
from tests.models import apart

FAST = (None, "float32"), ((2, 2), "bfloat16")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "mtp2"
    whole = load(model_dir("mtp2"))
    save(folder, whole.config, whole.params)
    return folder


@pytest.mark.parametrize(
    ("shape", "dtype"),
    apart([(s, d) for s in (None, (2, 2), (1, 2)) for d in ("float32", "bfloat16")], *FAST),
)
def test_restored_straight_to_its_shardings(stored: Path, shape: tuple[int, int] | None, dtype: str):
    mesh = make_mesh(*shape) if shape else None
    found, want = load(stored, dtype=dtype, mesh=mesh), load(model_dir("mtp2"), dtype=dtype)
    assert found.config == want.config
    assert_same(found.params, want.params)
    if mesh is not None:
        for spec, array in zip(
            jax.tree.leaves(param_specs(found.config)), jax.tree.leaves(found.params), strict=True
        ):
            assert array.sharding.spec == partition(*spec.axes)


@pytest.mark.rest
def test_saved_from_a_mesh(tmp_path: Path):
    whole = load(model_dir("tied"), mesh=make_mesh(2, 2))
    save(tmp_path / "x", whole.config, whole.params)
    found = restore(tmp_path / "x")
    assert_same(found.params, load(model_dir("tied")).params)
    assert found.bytes_read == sum(x.nbytes for x in jax.tree.leaves(whole.params))


def test_own_tables_and_dtype_come_back(tmp_path: Path):
    whole = load(model_dir("v3"), dtype="bfloat16")
    own = replace(whole.params.nextn[0], head=whole.params.embed)
    params = replace(whole.params, nextn=(own,))
    save(tmp_path / "x", whole.config, params)
    assert_same(restore(tmp_path / "x").params, params)


def test_fewer_nextn_layers(stored: Path, monkeypatch: pytest.MonkeyPatch):
    """The others are not read."""
    read, only = [], orbax_store._only

    def noted(targets: dict[str, Any]) -> Any:
        read.extend(targets)
        return only(targets)

    monkeypatch.setattr(orbax_store, "_only", noted)
    found = load(stored, num_nextn_layers=1)
    assert any(name.startswith("nextn.0.") for name in read)
    assert not any(name.startswith("nextn.1.") for name in read)
    assert_same(found.params, load(model_dir("mtp2"), num_nextn_layers=1).params)
    assert found.config.nextn_moe == (True,)


def test_convert(tmp_path: Path):
    source = tmp_path / "model"
    shutil.copytree(model_dir("v3"), source)
    beside = ("tokenizer.json", "added_tokens.json", "additional_chat_templates/tool_use.jinja")
    (source / "additional_chat_templates").mkdir()
    for name in beside:
        (source / name).write_text("{}")
    edit_json(source / "generation_config.json", eos_token_id=[1, 5])
    convert(source, tmp_path / "out", dtype="float32")
    assert is_orbax(tmp_path / "out")
    assert not is_orbax(source)
    assert all((tmp_path / "out" / name).exists() for name in beside)
    found = load(tmp_path / "out")
    assert found.config.eos_token_ids == (1, 5)
    assert_same(found.params, load(model_dir("v3")).params)


def test_without_nextn_layers_that_the_folder_declares_but_lacks(tmp_path: Path):
    source = edit_tensors(model_dir("v3"), tmp_path / "model", drop_nextn(model_dir("v3")))
    for refused in (lambda: summarise(source), lambda: convert(source, tmp_path / "out")):
        with pytest.raises(CheckpointError, match="num_nextn_layers=0 to describe or convert it"):
            refused()
    assert summarise(source, num_nextn_layers=0).nextn_parameters == 0
    convert(source, tmp_path / "out", num_nextn_layers=0, dtype="float32")
    found, whole = load(tmp_path / "out"), load(model_dir("v3"))
    assert found.config == whole.config.with_nextn(())
    assert_same(found.params, replace(whole.params, nextn=()))


def test_a_draft_has_no_place_beside_it(stored: Path):
    with pytest.raises(CheckpointError, match="give draft_model to `mtp-jax convert` instead"):
        load(stored, model_dir("v3"))
    with pytest.raises(CheckpointError, match="give draft_model to `mtp-jax convert` instead"):
        summarise(stored, model_dir("v3"))


def test_summary(stored: Path):
    ours, theirs = summarise(stored), summarise(model_dir("mtp2"))
    assert ours.nextn_layout == "Orbax"
    assert ours.parameters == theirs.parameters
    assert ours.stored_bytes == ours.weight_bytes["float32"]
    fewer = summarise(stored, num_nextn_layers=1)
    assert fewer.nextn_parameters == summarise(model_dir("mtp2"), num_nextn_layers=1).nextn_parameters
    assert 0 < fewer.nextn_parameters < ours.nextn_parameters
    assert fewer.stored_bytes < ours.stored_bytes
    with pytest.raises(CheckpointError, match=r"num_nextn_layers = 3, .* expected 0 to 2"):
        summarise(stored, num_nextn_layers=3)


def test_existing_folders_are_kept(stored: Path):
    whole = load(model_dir("mtp2"))
    with pytest.raises(CheckpointError, match="already holds an Orbax checkpoint"):
        save(stored, whole.config, whole.params)


def test_convert_writes_to_no_folder_that_holds_something(tmp_path: Path):
    source = tmp_path / "model"
    shutil.copytree(model_dir("v3"), source)
    before = (source / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="is there already and not empty"):
        convert(source, source)
    assert (source / "config.json").read_bytes() == before


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no marker": (lambda f: (f / "orbax.json").unlink(), ("config.json",)),
    "another format": (
        lambda f: edit_json(f / "orbax.json", format=9),
        ("orbax.json", "format 9", "expected 1"),
    ),
    "another dtype": (
        lambda f: edit_json(f / "orbax.json", dtype="int4"),
        ("orbax.json", "'int4'", "float32"),
    ),
    "own tables": (
        lambda f: edit_json(f / "orbax.json", nextn_own=[[]]),
        ("nextn_own is [[]]; expected 2 lists",),
    ),
    "own tables of another kind": (
        lambda f: edit_json(f / "orbax.json", nextn_own=[[], 3]),
        ("nextn_own is [[], 3]; expected 2 lists",),
    ),
    "a dtype of another kind": (
        lambda f: edit_json(f / "orbax.json", dtype=[]),
        ("orbax.json", "dtype []", "float32"),
    ),
    "config": (
        lambda f: edit_json(f / "config.json", hidden_size=128),
        ("params", "array embed has shape [160, 136]; expected [160, 128]"),
    ),
    "fewer layers": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=2),
        ("unexpected ['layers.2.",),
    ),
    "no arrays": (lambda f: shutil.rmtree(f / "params"), ("params", "cannot be restored")),
    "cut metadata": (
        lambda f: (f / "params" / "_METADATA").write_text("{"),
        ("params", "cannot be restored: its _METADATA is missing or damaged"),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(stored: Path, tmp_path: Path, kind: str):
    folder = tmp_path / "x"
    shutil.copytree(stored, folder)
    damage, fragments = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for fragment in fragments[: None if kind != "no marker" else 0]:
        assert fragment in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.rest
def test_cut_arrays(stored: Path, tmp_path: Path):
    """In a process of its own: reads that Orbax leaves behind complain to stderr at any time."""
    folder = tmp_path / "x"
    shutil.copytree(stored, folder)
    for path in (folder / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000 and not path.name.startswith("_"):
            path.write_bytes(path.read_bytes()[:100])
    code = """if True:
        import sys
        from mtp_jax.checkpoint import load
        from mtp_jax.errors import CheckpointError
        try:
            load(sys.argv[1])
        except CheckpointError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith(f"{folder / 'params'} cannot be restored")


def test_wrong_arguments(stored: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="'int8' is not supported"):
        restore(stored, dtype="int8")
    with pytest.raises(CheckpointError, match="expected 0 to 2"):
        restore(stored, num_nextn_layers=3)
    with pytest.raises(CheckpointError, match=r"has no orbax\.json"):
        restore(tmp_path)
    assert json.loads((stored / "orbax.json").read_text())["format"] == 1
