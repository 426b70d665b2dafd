"""What is written is read back, here and by the reference library, and has the layout of the release."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from mtp_jax.checkpoint import export_nextn, load, save_checkpoint, save_drafter
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model.family import config_of
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.files import assert_same, edit_tensors, random_params, read_folder
from tests.golden import HEADS, VARIANTS, model_dir, raw_config
from tests.models import apart

SMALL = 400_000  # bytes; several shards for these models


# One of each kind of attention, of each layout of tables, and of narrow files.
FAST = ("v3", "mtp2", "tied", "fp8", "glm46", "dsa_glm52")


@pytest.mark.parametrize("variant", apart(VARIANTS, *FAST))
def test_float32_comes_back(tmp_path: Path, variant: str):
    before = load(model_dir(variant))
    save_checkpoint(tmp_path, before.config, before.params, "float32", SMALL)
    after = load(tmp_path)
    assert_same(after.params, before.params)
    assert after.config == replace(before.config, dtype="float32", fp8=False)


def test_bfloat16_comes_back(tmp_path: Path):
    before = load(model_dir("mtp2"), dtype="bfloat16")
    save_checkpoint(tmp_path, before.config, before.params)
    assert_same(load(tmp_path, dtype="bfloat16").params, before.params)
    stored = {name: t.dtype for name, t in read_folder(tmp_path).items()}
    assert stored["model.layers.0.self_attn.kv_b_proj.weight"] == "BF16"
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"] == "F32"
    assert stored["model.norm.weight"] == "F32"


def test_the_release_layout(tmp_path: Path):
    before = load(model_dir("v3"))
    save_checkpoint(tmp_path, before.config, before.params, "float32", SMALL)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]
    assert count > 3
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*files, INDEX, "config.json"])

    names = list(index["weight_map"])
    assert names[0] == "model.embed_tokens.weight"
    experts = [n for n in names if n.startswith("model.layers.1.mlp.experts.")]
    assert experts[:4] == [
        f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"
        for e, part in ((0, "gate"), (0, "up"), (0, "down"), (1, "gate"))
    ]
    assert names.index("lm_head.weight") < names.index("model.layers.3.enorm.weight")

    ours, theirs = read_folder(tmp_path), read_folder(model_dir("v3"))
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert set(names) == ours.keys() == theirs.keys() - copies
    assert all(ours[n] == theirs[n] for n in ours)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in ours.values())
    assert all((tmp_path / f).stat().st_size < SMALL + 100_000 for f in files)

    written = json.loads((tmp_path / "config.json").read_text())
    known = raw_config("v3")
    differing = {k for k in known.keys() & written.keys() if known[k] != written[k]}
    assert not differing
    assert config_of(written) == before.config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_library_reads_it(tmp_path: Path, dtype: str):
    before = load(model_dir("v3"))
    save_checkpoint(tmp_path, before.config, before.params, dtype)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            got = file.get_tensor(name)
            want = before.params.embed if "embed" in name else before.params.norm
            np.testing.assert_array_equal(got, np.asarray(want).astype(got.dtype))
        assert file.metadata() == {"format": "pt"}


def test_tensors_are_aligned(tmp_path: Path):
    before = load(model_dir("v3"))
    save_checkpoint(tmp_path, before.config, before.params)
    blob = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(blob[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(blob[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0


@pytest.mark.rest
def test_an_earlier_checkpoint_is_replaced(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"someone else's")
    before = load(model_dir("v3"))
    save_checkpoint(tmp_path, before.config, before.params, "float32", SMALL)
    save_checkpoint(tmp_path, before.config, before.params, "float32", 2 * SMALL)
    (tmp_path / "other.safetensors").unlink()
    assert_same(load(tmp_path).params, before.params)
    save_checkpoint(tmp_path, before.config, before.params, "float32")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_same(load(tmp_path).params, before.params)


def test_sharded_parameters(tmp_path: Path):
    before = load(model_dir("v3"), mesh=make_mesh(2, 2))
    save_checkpoint(tmp_path, before.config, before.params, "float32")
    assert_same(load(tmp_path).params, before.params)


def test_own_tables_are_written(tmp_path: Path):
    before = load(model_dir("v3"))
    own = replace(before.params.nextn[0], embed=before.params.embed * 2)
    params = replace(before.params, nextn=(own,))
    save_checkpoint(tmp_path, before.config, params, "float32")
    assert_same(load(tmp_path).params, params)


@pytest.mark.parametrize("narrow", [{}, {"v_head_dim": 1}, {"qk_nope_head_dim": 1}])
def test_random_parameters(tmp_path: Path, narrow: dict[str, int], rng: np.random.Generator):
    cfg = replace(load(model_dir("no_q_lora")).config, **narrow)
    params = random_params(cfg, rng, "bfloat16")
    save_checkpoint(tmp_path, cfg, params)
    assert_same(load(tmp_path, dtype="bfloat16").params, params)


def test_what_cannot_be_written(tmp_path: Path):
    before = load(model_dir("v3"))
    with pytest.raises(ConfigError, match="'float8' is not supported; expected one of"):
        save_checkpoint(tmp_path, before.config, before.params, "float8")
    for params in (replace(before.params, nextn=()), replace(before.params, norm=jnp.ones(3))):
        with pytest.raises(CheckpointError, match="not those of this config"):
            save_checkpoint(tmp_path, before.config, params)
    assert not list(tmp_path.iterdir())


def test_export_is_the_lmsys_layout(tmp_path: Path):
    export_nextn(model_dir("v3"), tmp_path / "new" / "draft")
    theirs = model_dir("v3", "nextn")
    assert read_folder(tmp_path / "new" / "draft") == read_folder(theirs)
    for name in ("config.json", INDEX):
        ours = json.loads((tmp_path / "new" / "draft" / name).read_text())
        assert ours | {"metadata": 0} == json.loads((theirs / name).read_text()) | {"metadata": 0}


def test_export_to_xllm(tmp_path: Path):
    export_nextn(model_dir("v3"), tmp_path / "draft", "xllm")
    theirs = model_dir("v3", "xllm_mtp")
    assert read_folder(tmp_path / "draft") == read_folder(theirs)
    ours, expected = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "draft", theirs))
    assert ours == {key: value for key, value in expected.items() if key != "quantization_config"}
    assert_same(load(model_dir("v3"), tmp_path / "draft").params, load(model_dir("v3")).params)


def test_what_xllm_does_not_read(tmp_path: Path):
    for name, told in (
        ("mtp2", "this is deepseek_v3 with 2; take"),
        ("dsa_v32", "this is deepseek_v32 with 1; take"),
        ("glm45", "this is GLM-4.5"),
    ):
        with pytest.raises(ConfigError, match=told):
            export_nextn(model_dir(name), tmp_path / name, "xllm")
        assert not (tmp_path / name).exists()


def test_export_keeps_fp8(tmp_path: Path):
    export_nextn(model_dir("fp8"), tmp_path)
    whole, part = read_folder(model_dir("fp8")), read_folder(tmp_path)
    assert any(t.dtype == "F8_E4M3" for t in part.values())
    assert all(t == whole[n.replace("layers.0", "layers.3")] for n, t in part.items())
    assert_same(load(model_dir("fp8"), tmp_path).params, load(model_dir("fp8")).params)


def test_export_keeps_tables_that_differ(tmp_path: Path):
    name = "model.layers.3.embed_tokens.weight"
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.update({name: t[name].filled(1)}))
    export_nextn(folder, tmp_path / "draft")
    assert "model.layers.0.embed_tokens.weight" in read_folder(tmp_path / "draft")
    assert_same(load(folder, tmp_path / "draft").params, load(folder).params)


def test_what_cannot_be_exported(tmp_path: Path):
    before = load(model_dir("v3"), num_nextn_layers=0)
    save_checkpoint(tmp_path / "none", before.config, before.params)
    with pytest.raises(CheckpointError, match="has no NextN layer"):
        export_nextn(tmp_path / "none", tmp_path / "draft")
    with pytest.raises(CheckpointError, match="is there already and not empty"):
        export_nextn(model_dir("v3"), tmp_path / "none")


ALONE = "mtp2", "fp8", "glm45", "dsa_glm5", *HEADS


@pytest.mark.parametrize("variant", apart(ALONE, "mtp2", "eagle3", "dflash", "dspark"))
def test_a_drafter_comes_back_alone(tmp_path: Path, variant: str):
    """Beside the same trunk, in bfloat16, with the configuration that it had but for the dtype."""
    draft = model_dir(variant, "draft") if variant in HEADS else None
    before = load(model_dir(variant), draft)
    save_drafter(
        tmp_path, before.config, before.params, read_json((draft or model_dir(variant)) / "config.json")
    )
    after = load(model_dir(variant), tmp_path)
    told = (str(found.config).replace("bfloat16", "float32") for found in (before, after))
    assert len({*told}) == 1

    def rounded(a: jax.Array) -> np.ndarray:
        found = np.asarray(a)
        return found if a.dtype == jnp.int32 else found.astype(jnp.bfloat16)

    for got, want in zip(*map(jax.tree.leaves, (after.params.drafts, before.params.drafts)), strict=True):
        np.testing.assert_array_equal(rounded(got), rounded(want))
    assert_same(after.params.with_drafts(), before.params.with_drafts())
    names = read_folder(tmp_path)
    assert not [name for name in names if name.startswith("draft_head")]
    if draft is None:
        assert {name.split(".")[2] for name in names} == {
            str(before.config.num_hidden_layers + k) for k in range(before.config.num_nextn_predict_layers)
        }
