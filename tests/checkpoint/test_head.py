"""Draft heads: their configuration in every dialect, their tensors, and heads that are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from mtp_jax.checkpoint import DraftFolder, convert, load, restore, summarise
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.heads.blocks.declared import BlockConfig
from mtp_jax.heads.eagle3.declared import Eagle3, Eagle3Config
from mtp_jax.json_object import JsonObject
from mtp_jax.model.head import Captures
from mtp_jax.model.spec import count, leaves
from mtp_jax.model.specs import param_specs
from tests.checkpoint.files import Raw, Tensors, assert_same, copy_folder, edit_json, edit_tensors, read_raw
from tests.golden import BLOCKS, EAGLES, expected, model_dir
from tests.models import apart

TRUNK, HEAD = model_dir("eagle3"), model_dir("eagle3", "draft")


def head_of(variant: str) -> Eagle3Config:
    found = load(model_dir(variant), model_dir(variant, "draft")).config.drafter
    assert isinstance(found, Eagle3Config)
    return found


def block_of(variant: str, draft: Path | None = None) -> BlockConfig:
    found = load(model_dir(variant), draft or model_dir(variant, "draft")).config.drafter
    assert isinstance(found, BlockConfig)
    return found


def edited(tmp_path: Path, head: Path = HEAD, **changes: object) -> Path:
    folder = copy_folder(head, tmp_path / "head")
    edit_json(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize("variant", EAGLES)
def test_a_head_is_read_as_it_is_declared(variant: str):
    found = load(model_dir(variant), model_dir(variant, "draft"))
    head, params = head_of(variant), found.params.drafter
    assert head.taps == tuple(expected(variant)["eagle_capture"])
    assert (head.tap_norms, head.normed_output) == ((3, True) if variant == "eagle3_mla" else (0, False))
    assert (head.layer.gqa is None) == (variant == "eagle3_mla")
    assert isinstance(params, Eagle3)
    assert found.params.nextn == ()
    specs = param_specs(found.config)
    for array, spec in zip(jax.tree.leaves(params), leaves(specs.drafter), strict=True):
        assert array.shape == spec.shape
    raw = read_raw(model_dir(variant, "draft") / "model.safetensors")
    offset = np.frombuffer(raw["d2t"].data, np.int64)
    assert params.target_offset.dtype == np.int32
    np.testing.assert_array_equal(params.target_offset, offset)
    np.testing.assert_array_equal(
        params.fuse, np.frombuffer(raw["fc.weight"].data, np.float32).reshape(40, 120)
    )
    summary = summarise(model_dir(variant), model_dir(variant, "draft"))
    assert summary.nextn_layout == "EAGLE-3"
    assert summary.nextn_parameters == count(specs.drafter)
    assert "draft head" in summary.text()


def test_the_list_of_taps_counts_outputs_or_inputs():
    assert head_of("eagle3").taps == (2, 3, 5)  # 1, 2, 4: a list that begins with 1 counts outputs
    inputs, outputs = (load(TRUNK, DraftFolder(HEAD, c)).config.drafter for c in get_args(Captures)[::-1])
    assert inputs is not None
    assert inputs.taps == (1, 2, 4)
    assert outputs is not None
    assert outputs.taps == (2, 3, 5)


def test_a_head_without_a_list_reads_three_layers(tmp_path: Path):
    found = load(TRUNK, edited(tmp_path, eagle_config=None)).config.drafter
    assert found is not None
    assert found.taps == (2, 3, 3)


def test_the_dialect_of_speculators(tmp_path: Path):
    raw: JsonObject = json.loads((HEAD / "config.json").read_text())
    layer = {key: raw[key] for key in raw if key not in ("architectures", "draft_vocab_size", "eagle_config")}
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 52,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "norm_before_residual": True,
    }
    folder = copy_folder(HEAD, tmp_path / "head")
    (folder / "config.json").write_text(json.dumps(written))
    found = load(TRUNK, folder)
    assert found.config.drafter == replace(head_of("eagle3"), normed_residual=True)
    assert_same(found.params, load(TRUNK, HEAD).params)


def test_names_of_the_release_with_their_prefix(tmp_path: Path):
    def rename(t: Tensors) -> None:
        for name in list(t):
            t[f"model.{name.replace('midlayer', 'layers.0')}"] = t.pop(name)

    assert_same(load(TRUNK, edit_tensors(HEAD, tmp_path / "head", rename)).params, load(TRUNK, HEAD).params)


def test_an_embedding_of_the_head_is_kept_only_if_it_differs(tmp_path: Path):
    trunk = read_raw(TRUNK / "model.safetensors")["model.embed_tokens.weight"]

    def with_table(table: Raw) -> Callable[[Tensors], None]:
        return lambda t: t.update({"embed_tokens.weight": table})

    same = load(TRUNK, edit_tensors(HEAD, tmp_path / "same", with_table(trunk)))
    other = load(TRUNK, edit_tensors(HEAD, tmp_path / "other", with_table(trunk.filled(0))))
    assert same.config == load(TRUNK, HEAD).config
    assert isinstance(same.params.drafter, Eagle3)
    assert same.params.drafter.embed is None
    assert other.config.drafter is not None
    assert other.config.drafter.embeds
    assert isinstance(other.params.drafter, Eagle3)
    assert not other.params.drafter.embed.any()


def test_a_head_takes_the_place_of_nextn_layers():
    found = load(model_dir("eagle3"), HEAD, num_nextn_layers=0)
    assert found.config.num_nextn_predict_layers == 0
    assert found.config.drafter
    with pytest.raises(ConfigError, match="num_nextn_layers = 1 beside the EAGLE-3 head"):
        load(TRUNK, HEAD, num_nextn_layers=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 48}, "target_hidden_size = 48, the model has 40"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}}, r"\[2, 3, 7\], inputs of layers"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states = 4, but .* names 3"),
        ({"fc_norm": True, "norm_before_fc": True}, "expected one of them at most"),
        ({"norm_output": "yes"}, "norm_output = 'yes'; expected true or false"),
        ({"layer_types": [[]]}, "a head with a sliding window is not supported; expected full attention"),
        ({"layer_types": ["full_attention", {}]}, "expected full attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope scaling 'llama3' is not supported"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"logit_scale": 0}, "logit_scale = 0; expected a positive number"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_its_weights_are_read(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as found:
        summarise(TRUNK, edited(tmp_path, **changes))
    assert str(tmp_path) in str(found.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing \(1\): draft_head.fc.weight"),
        (lambda t: t.pop("d2t"), r"missing \(1\): draft_head.d2t"),
        (lambda t: t.update({"extra.weight": t["fc.weight"]}), r"unexpected \(1\): .*extra.weight"),
        (lambda t: t.update({"norm.weight": t["fc.weight"]}), r"shape \[40, 120\]; expected \[40\]"),
        (lambda t: t.update({"d2t": t["d2t"].filled(1)}), "maps token 0 of the head to"),
        (lambda t: t.update({"t2d": t["t2d"].filled(1)}), "marks other tokens than"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, edit: Callable[[Tensors], object], message: str):
    with pytest.raises(CheckpointError, match=message):
        summarise(TRUNK, edit_tensors(HEAD, tmp_path / "head", edit))


@pytest.mark.parametrize("variant", BLOCKS)
def test_a_block_drafter_is_read_as_it_is_declared(variant: str):
    found = load(model_dir(variant), model_dir(variant, "draft"))
    head, want = block_of(variant), expected(variant)
    assert head.taps == tuple(want["block_capture"] + 1)  # outputs of layers
    assert head.most_drafts == len(want["draft_ids"])
    assert head.name.lower() == variant
    two = ((3, 8), (12, 6)) if variant == "dflash2" else (None, None)
    assert (head.convolution, head.selector) == two
    three = (16, True, True) if variant == "dspark" else (0, False, False)
    assert (head.markov, head.confidence, head.anchored) == three
    assert (head.maps, head.embeds, head.heads) == (False, False, False)
    specs = param_specs(found.config)
    for array, spec in zip(jax.tree.leaves(found.params.drafter), leaves(specs.drafter), strict=True):
        assert array.shape == spec.shape
    assert summarise(model_dir(variant), model_dir(variant, "draft")).nextn_layout == head.name


def test_a_dspark_head_drafts_from_its_anchor_unless_it_says_otherwise(tmp_path: Path):
    said = edited(tmp_path / "said", model_dir("dspark", "draft"), sample_from_anchor=False)
    silent = edited(tmp_path / "silent", model_dir("dspark", "draft"), sample_from_anchor=None)
    assert not block_of("dspark", said).anchored
    assert block_of("dspark", silent) == block_of("dspark")


def test_names_and_keys_of_a_block_drafter_in_other_dialects(tmp_path: Path):
    def rename(t: Tensors) -> None:
        t["model.encoder.fc.weight"] = t.pop("fc.weight")
        t["model.encoder.output_norm_enc.weight"] = t.pop("hidden_norm.weight")

    raw: JsonObject = json.loads((model_dir("dflash", "draft") / "config.json").read_text())
    folder = edit_tensors(model_dir("dflash", "draft"), tmp_path / "head", rename)
    kept = {"speculators_model_type": "dflash", "block_size": 5, "mask_token_id": 79}
    kept |= {"aux_hidden_state_layer_ids": [1, 3, 4], "transformer_layer_config": raw}
    (folder / "config.json").write_text(json.dumps(kept))
    assert block_of("dflash", folder) == block_of("dflash")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 79, "target_layer_ids": [1, 3, 6]}}, r"\[1, 3, 6\], outputs of"),
        ({"num_target_layers": 7}, "num_target_layers = 7, the model has 6"),
        ({"block_size": 1}, "block_size = 1; expected a whole number from 2 to 256"),
        ({"block_size": 100_000}, "block_size = 100000; expected a whole number from 2 to 256"),
        ({"num_hidden_layers": 65_536}, "num_hidden_layers = 65536 of a head, whose file has 2; expected 2"),
        ({"num_hidden_layers": 1}, "num_hidden_layers = 1 of a head, whose file has 2; expected 2"),
        ({"mask_token_id": -1}, "mask_token_id = -1; expected a whole number from 0"),
        ({"mask_token_id": 80}, "mask_token_id = 80; expected a whole number from 0 to 79"),
        ({"projector_type": "domino"}, "Domino projectors are not supported"),
        ({"markov_head_type": "gated"}, "markov_head_type = 'gated' is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 of a head is not supported"),
        ({"sliding_window_non_causal": True}, "sliding window is not supported"),
        ({"conv_kernel_size": 3, "conv_group_size": 7}, "conv_group_size = 7 does not divide 40 channels"),
    ],
)
def test_a_block_drafter_that_is_refused(tmp_path: Path, changes: JsonObject, message: str):
    with pytest.raises(ConfigError, match=message):
        summarise(model_dir("dflash"), edited(tmp_path, model_dir("dflash", "draft"), **changes))


def test_draft_captures_without_a_head():
    with pytest.raises(ConfigError, match="without a draft_model"):
        DraftFolder.of(None, "inputs")
    with pytest.raises(ConfigError, match="has NextN layers, which read no taps"):
        load(model_dir("v3"), DraftFolder(model_dir("v3", "nextn"), "inputs"))


def test_a_pickle_is_refused(tmp_path: Path):
    folder = copy_folder(HEAD, tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read: that format can run code"):
        load(TRUNK, folder)


@pytest.mark.parametrize("variant", apart(["eagle3", "dflash2"], "dflash2"))
def test_orbax_keeps_the_head(tmp_path: Path, variant: str):
    trunk, head = model_dir(variant), model_dir(variant, "draft")
    convert(trunk, tmp_path / "out", head, dtype="float32")
    whole, found = load(trunk, head), restore(tmp_path / "out")
    assert found.config == replace(whole.config, dtype="float32")
    assert_same(found.params, whole.params)
    alone = restore(tmp_path / "out", num_nextn_layers=0)
    assert alone.config.drafter is None
    assert not alone.params.can_draft


def test_an_update_reads_the_head_from_its_folder_or_keeps_it(tmp_path: Path):
    loaded = load(TRUNK, HEAD)
    new = read_update(loaded.config, loaded.params, TRUNK, HEAD, dtype="float32")
    assert_same(new, loaded.params)
    kept = read_update(loaded.config, loaded.params, TRUNK, dtype="float32", keep_draft=True)
    assert not kept.can_draft
    with pytest.raises(ConfigError, match="give draft_model=, or keep_draft=True"):
        read_update(loaded.config, loaded.params, TRUNK, dtype="float32")
    with pytest.raises(CheckpointError, match="does not fit the loaded drafter"):
        read_update(loaded.config, loaded.params, TRUNK, edited(tmp_path, norm_output=True), dtype="float32")


def test_an_update_takes_the_list_of_taps_as_the_load_did(tmp_path: Path):
    """The default reading names the output of a layer that the model does not have."""

    def reading(name: str, *layers: int) -> Path:
        return edited(tmp_path / name, eagle_config={"eagle_aux_hidden_state_layer_ids": layers})

    last = load(TRUNK).config.num_hidden_layers
    head, other = reading("a", 1, 2, last), reading("b", 0, 2, last)
    with pytest.raises(ConfigError, match="outputs of layers"):
        load(TRUNK, head)
    loaded = load(TRUNK, DraftFolder(head, "inputs"))
    assert_same(read_update(loaded.config, loaded.params, TRUNK, head, dtype="float32"), loaded.params)
    with pytest.raises(CheckpointError, match="does not fit the loaded drafter"):
        read_update(loaded.config, loaded.params, TRUNK, other, dtype="float32")
