"""Draft heads under names of other models: the tensors of a folder tell its kind, layers and tables."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoint import convert, load, summarise
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.heads.blocks.declared import BlockConfig
from mtp_jax.heads.eagle3.declared import Eagle3, Eagle3Config
from mtp_jax.model.config import YarnConfig
from mtp_jax.model.spec import count
from mtp_jax.model.specs import param_specs
from tests.checkpoint.compressed import BLOCKS as FP8_BLOCKS
from tests.checkpoint.files import Raw, Tensors, assert_same, copy_folder, edit_json, edit_tensors, read_raw
from tests.golden import model_dir

TRUNK, HEAD, MLA = model_dir("eagle3"), model_dir("eagle3", "draft"), model_dir("eagle3_mla", "draft")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def named(to: Path, head: Path = HEAD, **changes: object) -> Path:
    folder = copy_folder(head, to / "head")
    edit_json(folder / "config.json", **changes)
    return folder


NAMES: dict[str, dict[str, Any]] = {
    "a plain Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Llama's EAGLE-3": {"architectures": ["Eagle3LlamaForCausalLM"]},
    "SpecForge": {"architectures": ["LlamaForCausalLMEagle3"]},
    "nothing": {"architectures": None, "model_type": None},
    "an empty list": {"architectures": []},
    "no list": {"architectures": "LlamaForCausalLM"},
    "the trunk": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "the layers of a model": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
    "no number of layers": {"num_hidden_layers": None},
    "the vocabulary of a model": {"vocab_size": 128_256, "draft_vocab_size": None},
}


@pytest.mark.parametrize("name", NAMES)
def test_an_eagle3_head_under_any_name(name: str, tmp_path: Path):
    found = load(TRUNK, named(tmp_path, **NAMES[name]))
    want = load(TRUNK, HEAD)
    assert found.config == want.config
    assert_same(found.params, want.params)


def test_a_plain_name_without_a_list_of_taps(tmp_path: Path):
    """EAGLE's own three: near the start, in the middle, near the end."""
    found = load(TRUNK, named(tmp_path, architectures=["LlamaForCausalLM"], eagle_config=None)).config.drafter
    assert isinstance(found, Eagle3Config)
    assert found.taps == (2, 3, 3)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", None])
def test_a_block_head_under_any_name(name: str | None, tmp_path: Path):
    head = model_dir("dflash", "draft")
    folder = named(tmp_path, head, architectures=[name] if name else None)
    found, want = load(model_dir("dflash"), folder), load(model_dir("dflash"), head)
    assert isinstance(found.config.drafter, BlockConfig)
    assert found.config == want.config
    assert_same(found.params, want.params)


def narrowed(tensors: Tensors, bias: bool) -> None:
    """As EAGLE-1 has it: fc reads a token's embedding and one hidden state; no norm of hidden states."""
    fc = tensors["fc.weight"]
    tensors["fc.weight"] = Raw(fc.dtype, [40, 80], fc.data[: 40 * 80 * 4])
    del tensors["midlayer.hidden_norm.weight"]
    if bias:
        tensors["fc.bias"] = Raw("F32", [40], bytes(160))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_of_eagle_1_and_2_are_refused_by_that_name(name: str, bias: bool, tmp_path: Path):
    folder = edit_tensors(HEAD, tmp_path / "head", lambda tensors: narrowed(tensors, bias))
    edit_json(folder / "config.json", architectures=[name])
    with pytest.raises(ConfigError, match=r"fc\.weight is \[40, 80\].* EAGLE-1 or EAGLE-2, which is not"):
        summarise(TRUNK, folder)


def test_other_folders_keep_their_own_errors(tmp_path: Path):
    export = copy_folder(model_dir("v3", "nextn"), tmp_path / "nextn")
    edit_json(export / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="model_type 'mamba' is not supported; expected one of"):
        summarise(model_dir("v3"), export)
    with pytest.raises(CheckpointError, match="does not fit the model: "):
        summarise(TRUNK, model_dir("v3", "nextn"))

    def two(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer", "layers.1")] = tensors[name]

    with pytest.raises(ConfigError, match="an EAGLE-3 head of 2 layers is not supported; expected 1"):
        summarise(TRUNK, edit_tensors(HEAD, tmp_path / "two", two))


def test_a_head_without_tables_drafts_by_the_trunks(tmp_path: Path):
    """Its numbers of parameters are the trunk's part less; a tokenizer of another size does not matter."""

    def bare(tensors: Tensors) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]

    folder = edit_tensors(HEAD, tmp_path / "bare", bare)
    edit_json(folder / "config.json", vocab_size=128_256, draft_vocab_size=32_000)
    found = load(TRUNK, folder)
    head, params = found.config.drafter, found.params.drafter
    assert isinstance(head, Eagle3Config)
    assert isinstance(params, Eagle3)
    assert (head.heads, head.embeds, head.maps, head.layer.vocab_size) == (False, False, False, 80)
    assert params.head is params.embed is params.target_offset is None
    own = summarise(TRUNK, folder)
    whole = summarise(TRUNK, HEAD)
    assert own.nextn_parameters == count(param_specs(found.config).drafter)
    assert whole.nextn_parameters == own.nextn_parameters + 52 * 40 + 52
    assert own.weight_bytes["float32"] == whole.weight_bytes["float32"] - 4 * (52 * 40 + 52)
    convert(TRUNK, tmp_path / "orbax", folder, dtype="float32")
    assert_same(load(tmp_path / "orbax").params, found.params)


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path):
    """Of the embedding, or of the marks of the tokens that the head drafts."""
    marks = read_raw(HEAD / "model.safetensors")["t2d"]
    longer: dict[str, Raw] = {
        "embed_tokens.weight": Raw("F32", [81, 40], bytes(81 * 40 * 4)),
        "t2d": Raw("BOOL", [81], marks.data + bytes(1)),
    }
    for name, table in longer.items():
        folder = edit_tensors(HEAD, tmp_path / name, lambda t, n=name, w=table: t.update({n: w}))
        with pytest.raises(ConfigError, match="the head is made for vocab_size = 81, the model has 80"):
            summarise(TRUNK, folder)


def test_a_new_head_has_a_table_of_its_own():
    trunk = load(TRUNK).config
    raw = json.loads((HEAD / "config.json").read_text()) | {"draft_vocab_size": 80}
    head = Eagle3Config.read(raw, trunk, {}, None)
    assert (head.heads, head.maps) == (True, False)


def test_yarn_in_a_layer_of_either_attention(tmp_path: Path):
    for part, head in (("gqa", HEAD), ("mla", MLA)):
        trunk = model_dir(head.parent.name)
        found = load(trunk, named(tmp_path / part, head, rope_scaling=YARN)).config.drafter
        assert isinstance(found, Eagle3Config)
        assert found.layer.rope_scaling == YarnConfig(4.0, 4096)


@pytest.mark.parametrize("head", [HEAD, MLA], ids=["midlayer", "layers.0"])
def test_fp8_heads_of_llm_compressor(head: Path, tmp_path: Path):
    """Under the names of the release, and under its own."""
    name = "midlayer" if head == HEAD else "layers.0"

    def narrow(tensors: Tensors, ending: str) -> None:
        weight = f"{name}.mlp.up_proj.weight"
        wide = np.frombuffer(tensors[weight].data, np.float32).astype(ml_dtypes.float8_e4m3fn)
        tensors[weight] = Raw("F8_E4M3", tensors[weight].shape, wide.tobytes())
        tensors[weight + ending] = Raw("F32", [1, 1], np.float32(2).tobytes())

    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = []
    for ending, said in (("_scale_inv", quant), ("_scale", FP8_BLOCKS)):
        folder = edit_tensors(head, tmp_path / ending, lambda t, e=ending: narrow(t, e))
        edit_json(folder / "config.json", quantization_config=said)
        found.append(load(model_dir(head.parent.name), folder, narrow="dequantise").params)
    assert_same(*found)
