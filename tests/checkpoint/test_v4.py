"""DeepSeek-V4's checkpoints: every tensor accounted for, and the drafter told from its tensors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load, summarise
from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.narrow import nbytes
from mtp_jax.model.params import param_specs
from mtp_jax.model.spec import leaves
from tests.checkpoint.files import assert_same, copy_folder, edit_json, edit_tensors, read_folder
from tests.lab.planning.releases import write
from tests.v4 import DSPARK, Arrays, by_name, v4_config, v4_tensors, write_v4

TABLE = "layers.0.ffn.gate.tid2eid"


def small(**changes: Any) -> dict[str, Any]:
    """Two layers of four experts."""
    layers = {"num_hidden_layers": 2, "compress_ratios": [4, 128, 0], "n_routed_experts": 4}
    return v4_config(**layers | changes)


STAGED = small(**DSPARK | {"dspark_target_layer_ids": [0, 1]}, compress_ratios=[4, 128, 0, 0, 0])


def same(loaded: Loaded, want: Arrays) -> None:
    got = by_name(loaded.config, loaded.params)
    assert got.keys() == want.keys()
    for name, values in got.items():
        np.testing.assert_array_equal(values, want[name], name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4") / "plain"
    write_v4(folder, small(), v4_tensors(small()))
    return folder


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4") / "dspark"
    write_v4(folder, STAGED, v4_tensors(STAGED))
    return folder


def test_every_tensor_arrives(tmp_path: Path):
    config = v4_config()
    held = write_v4(tmp_path, config, v4_tensors(config))
    loaded = load(tmp_path)
    same(loaded, held)
    assert loaded.config.num_nextn_predict_layers == 1
    assert loaded.bytes_read == sum(w.nbytes for w in held.values())
    trunk = load(tmp_path, num_nextn_layers=0)
    same(trunk, {name: w for name, w in held.items() if not name.startswith("mtp.")})
    assert not trunk.config.drafts


def test_several_mtp_layers(tmp_path: Path):
    config = small(num_nextn_predict_layers=2, compress_ratios=[4, 128, 0, 0])
    held = write_v4(tmp_path, config, v4_tensors(config))
    same(load(tmp_path), held)
    assert load(tmp_path, num_nextn_layers=1).config.num_nextn_predict_layers == 1
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1, compress_ratios=[4, 128])
    with pytest.raises(CheckpointError, match=r"but tensors of 2 .*\(mtp\.1\.enorm\.weight is there\)"):
        load(tmp_path)


def test_mtp_layers_in_a_folder_of_their_own(plain: Path, tmp_path: Path):
    def drop(tensors: dict[str, Any], drafts: bool) -> None:
        for name in [n for n in tensors if n.startswith("mtp.") == drafts]:
            del tensors[name]

    trunk = edit_tensors(plain, tmp_path / "trunk", lambda t: drop(t, True))
    alone = edit_tensors(plain, tmp_path / "mtp", lambda t: drop(t, False))
    assert_same(load(trunk, alone).params, load(plain).params)
    with pytest.raises(CheckpointError, match=r"MTP layers that were exported by themselves, and no model"):
        load(alone)
    with pytest.raises(CheckpointError, match=r"tensors of 0 .*\(mtp\.0\.enorm\.weight is missing\)"):
        load(trunk)
    with pytest.raises(
        CheckpointError, match=r"no tensor of mtp\.\*; expected MTP layers.* or DSpark stages"
    ):
        load(plain, trunk)


def test_copies_of_the_tables(plain: Path, tmp_path: Path):
    """V4-Flash-Base has them; they are kept only if they differ."""
    config, tensors = small(), v4_tensors(small())
    own = {"mtp.0.emb.tok_emb.weight": "embed.weight", "mtp.0.head.weight": "head.weight"}
    copies = {name: tensors[like] for name, like in own.items()}
    write_v4(tmp_path / "equal", config, tensors | copies)
    assert_same(load(tmp_path / "equal").params, load(plain).params)
    write_v4(tmp_path / "other", config, tensors | {name: 2 * w for name, w in copies.items()})
    loaded = load(tmp_path / "other")
    np.testing.assert_array_equal(loaded.params.nextn[0].embed, 2 * loaded.params.embed)
    np.testing.assert_array_equal(loaded.params.nextn[0].head, 2 * loaded.params.head)


def test_dspark_stages(dspark: Path, plain: Path, tmp_path: Path):
    """Their tensors count them; config.json says one MTP layer beside them, as releases do."""
    loaded, whole = load(dspark), read_folder(dspark)
    assert by_name(loaded.config, loaded.params).keys() == whole.keys()
    same(loaded, v4_tensors(STAGED))
    head = loaded.config.drafter
    assert isinstance(head, StagesConfig)
    assert (head.layers.num_hidden_layers, head.block, head.mask, head.most_drafts) == (3, 4, 63, 4)
    assert (head.taps, loaded.config.num_nextn_predict_layers, loaded.params.nextn) == ((1, 2), 0, ())
    folder = copy_folder(dspark, tmp_path / "model")
    edit_json(
        folder / "config.json", n_mtp_layers=None, num_nextn_predict_layers=None, compress_ratios=[4, 128]
    )
    assert load(folder).config == loaded.config
    trunk = load(dspark, num_nextn_layers=0)
    assert not trunk.config.drafts
    assert all(not name.startswith("mtp.") for name in by_name(trunk.config, trunk.params))
    with pytest.raises(ConfigError, match="num_nextn_layers = 1 beside the DSpark head"):
        load(dspark, num_nextn_layers=1)
    assert load(dspark, plain).config.num_nextn_predict_layers == 1
    assert load(plain, dspark).config.drafter == head
    config = small(compress_ratios=[4, 128, 0, 0, 0])
    with pytest.raises(ConfigError, match="compress_ratios has 5 entries; expected 2"):
        config_of(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dspark_block_size", 0, "dspark_block_size = 0; expected a whole number from 1"),
        ("dspark_noise_token_id", 64, "dspark_noise_token_id = 64; expected a whole number from 0 to 63"),
        ("dspark_target_layer_ids", [-1, 1], r"dspark_target_layer_ids = \[-1, 1\], outputs of layers"),
        ("dspark_target_layer_ids", [0, 2], r"dspark_target_layer_ids = \[0, 2\].*the model, which has 2"),
        ("dspark_markov_rank", None, "dspark_markov_rank = None"),
        ("n_mtp_layers", 4, "n_mtp_layers = 4; expected 3, or no such key"),
    ],
)
def test_stages_that_config_json_does_not_describe(
    dspark: Path, tmp_path: Path, key: str, value: object, message: str
):
    folder = copy_folder(dspark, tmp_path / "model")
    edit_json(folder / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=f"{folder} has 3 DSpark stages: {message}"):
        load(folder)
    assert not load(folder, num_nextn_layers=0).config.drafts


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    """A change: without all tensors whose names begin so."""

    def change(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(names)]:
            del tensors[name]

    return change


def add(name: str, like: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[like]

    return change


STAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no first": (drop("mtp.0."), r"has 2 draft layers, mtp\.1, 2; mtp\.0 is missing"),
    "none between": (drop("mtp.1."), r"has 2 draft layers, mtp\.0, 2; mtp\.1 is missing"),
    "a number past all": (
        add("mtp.999999999.x", "mtp.0.attn_norm.weight"),
        r"has 4 draft layers, mtp\.0, 1, 2, 999999999; mtp\.3 is missing",
    ),
    "no last": (
        drop("mtp.2."),
        r"has 2 DSpark stages, mtp\.0 to mtp\.1, without mtp\.1\.markov_head\.markov_w1\.weight.*missing",
    ),
    "no context": (drop("mtp.0.main_proj"), r"3 DSpark stages.*without mtp\.0\.main_proj\.weight"),
    "half and half": (
        add("mtp.0.enorm.weight", "mtp.0.attn_norm.weight"),
        r"half MTP, half DSpark: 1 tensors of MTP layers \(mtp\.0\.enorm\.weight\) and 5 of DSpark stages",
    ),
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_that_are_not_whole(dspark: Path, tmp_path: Path, case: str):
    change, message = STAGES[case]
    folder = edit_tensors(dspark, tmp_path / "model", change)
    for nextn in (None, 0):
        with pytest.raises(CheckpointError, match=message):
            load(folder, num_nextn_layers=nextn)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any], tuple[str, ...]]] = {
    "no sink": (drop("layers.1.attn.attn_sink"), {}, ("missing (1): layers.1.attn.attn_sink",)),
    "no head": (drop("head.weight"), {}, ("missing (1): head.weight", "tie_word_embeddings = false")),
    "no MTP norm": (drop("mtp.0.hnorm"), {}, ("missing (1): mtp.0.hnorm.weight",)),
    "an extra": (
        add("mtp.0.emb.weight", "embed.weight"),
        {},
        ("unexpected (1): model.safetensors: mtp.0.emb.weight",),
    ),
    "hash layers": (drop(), {"num_hash_layers": 0}, ("num_hash_layers = 0; the layers with tid2eid are 0",)),
    "ratios": (
        drop(),
        {"compress_ratios": [128, 4, 0]},
        (
            "compress_ratios[0] = 128; the tensors of layer 0 have 4",
            "compress_ratios[1] = 4; the tensors of layer 1 have 128",
        ),
    ),
    "experts": (drop(), {"n_routed_experts": 8}, ("n_routed_experts = 8; the tensors have 4",)),
    "layers": (
        drop(),
        {"num_hidden_layers": 3, "compress_ratios": [4, 128, 0, 0]},
        ("num_hidden_layers = 3; the tensors have 2 trunk layers",),
    ),
    "streams": (drop(), {"hc_mult": 2}, ("hc_head_fn has shape [4, 256]; expected [2, 128]",)),
    "table": (drop(), {"num_experts_per_tok": 3}, (f"{TABLE} has shape [64, 2]; expected [64, 3]",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_and_config_that_do_not_fit(plain: Path, tmp_path: Path, case: str):
    change, told, fragments = WRONG[case]
    folder = edit_tensors(plain, tmp_path / "model", change)
    edit_json(folder / "config.json", **told)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    for fragment in (str(folder), *fragments):
        assert fragment in str(error.value)


@pytest.mark.parametrize("expert", [-1, 4])
def test_a_table_names_an_expert_that_is_not_there(tmp_path: Path, expert: int):
    tensors = v4_tensors(small())
    tensors[TABLE][5, 1] = expert
    write_v4(tmp_path, small(), tensors)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert f"{TABLE} gives token 5 expert {expert}; expected 0 to 3 (n_routed_experts = 4)" in str(
        error.value
    )


def test_bytes_of_the_release(tmp_path: Path):
    """V4-Pro has 1.6 T parameters, 49 B of them active, and takes in memory the bytes of its files."""
    summary = summarise(write(tmp_path, "DeepSeek-V4-Pro"))
    assert round(summary.parameters / 1e12, 1) == 1.6
    assert int(summary.active_parameters / 1e9) == 49
    stored = 0
    for spec in leaves(param_specs(summary.config)):
        name = str(spec_names(spec).flat[0])
        if ".ffn.experts." in name:
            stored += spec.size // 2 + spec.size // 32
        elif spec.projects:
            stored += spec.size + math.prod(-(-n // 128) for n in spec.tensor_shape)
        elif spec.ids:
            stored += 8 * spec.size
        else:
            single = "hc_" in name or name.endswith((".attn_sink", ".ape", ".gate.bias"))
            stored += (4 if single else 2) * spec.size
    assert stored < summary.weight_bytes["fp4 and fp8"] < 1.01 * stored
    assert summary.weight_bytes["fp4 and fp8"] < summary.weight_bytes["bfloat16"] / 3.5


def test_a_summary_of_tensors(plain: Path, dspark: Path, tmp_path: Path):
    fp4 = tmp_path / "fp4"
    write_v4(fp4, small(), v4_tensors(small()), fp4=True)
    summary, whole = summarise(fp4), summarise(plain)
    assert (summary.architecture, summary.nextn_layout) == ("deepseek_v4", "in place")
    assert summary.parameters == whole.parameters
    assert summary.stored_bytes == sum(len(t.data) for t in read_folder(fp4).values())
    assert {"I8", "F8_E8M0", "F8_E4M3", "BF16", "F32", "I64"} == summary.stored.keys()
    kept = load(fp4, narrow="keep", dtype="bfloat16").params
    assert summary.weight_bytes["fp4 and fp8"] == nbytes(kept)
    assert summary.weight_bytes["float32"] == nbytes(load(fp4, narrow="dequantise").params)
    assert summary.weight_bytes_on_cpu == nbytes(load(fp4, narrow="keep").params)
    text = "the last 16 tokens; in 1 of 2 layers 6 entries of 4 tokens, in 1 all entries of 128"
    assert text in summary.text()
    staged = summarise(dspark)
    assert (staged.nextn_layout, staged.parameters) == ("DSpark stages", whole.parameters)
    assert staged.nextn_parameters == sum(
        w.size for n, w in v4_tensors(STAGED).items() if n.startswith("mtp.")
    )
    assert "DSpark, 3 stages, 64 tokens; reads the stream after layers 1, 2" in staged.text()
    rows = (
        staged.cache_bytes_per_token["bfloat16"]
        - summarise(dspark, num_nextn_layers=0).cache_bytes_per_token["bfloat16"]
    )
    assert rows == 3 * 2 * STAGED["head_dim"]
